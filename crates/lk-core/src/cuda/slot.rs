//! The mailbox that GPU kernels and the leader thread share: a header of flags, then the payload.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{Error, Result};

/// Flags of a slot. Each writer has its own 128 bytes (a pair of cache lines), so that the GPU's poll never takes a line
/// away from the leader's.
///
/// The GPU sees the same bytes through the offsets in [`header_macros`].
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct SlotHeader {
    /// Written by `lk_send`.
    pub request: Request,
    /// Written by the host.
    pub answer: Answer,
    /// Written by `lk_receive` when it stops waiting.
    pub fault: Fault,
}

/// What a send asks for. The epoch is stored last, with release; the rest belongs to it.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Request {
    /// Number of the send through this slot, from 1.
    pub epoch: AtomicU64,
    /// Number of the layer, see `Mailbox::add_layer`.
    pub layer: AtomicU32,
    /// Rows of `hidden_states`.
    pub rows: AtomicU32,
    /// Bytes of one row of `hidden_states` and of the output.
    pub row_bytes: AtomicU32,
    /// Experts per row.
    pub top_k: AtomicU32,
}

/// What the host answers.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Answer {
    /// Last epoch that is answered; `u64::MAX` once the hand-over has ended, so that nobody waits again.
    pub done: AtomicU64,
    /// 0, or a reason why the output is not valid ([`STATUS_FAILED`], [`STATUS_CLOSED`]); never taken back.
    pub status: AtomicU32,
}

/// That the GPU gave up.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Fault {
    /// Epoch for which the GPU waited longer than its limit; 0 while that has not happened.
    pub epoch: AtomicU64,
}

/// The engine failed: a worker panicked, an input was refused, or a step made no progress.
pub(super) const STATUS_FAILED: u32 = 1;
/// The hand-over was closed in order.
pub(super) const STATUS_CLOSED: u32 = 2;

const _: () = {
    assert!(size_of::<SlotHeader>() == 384 && align_of::<SlotHeader>() == 128);
    assert!(offset_of!(SlotHeader, request) == 0);
    assert!(offset_of!(SlotHeader, answer) == 128);
    assert!(offset_of!(SlotHeader, fault) == 256);
};

/// The header's layout as C macros, which precede the kernels' source.
pub(super) fn header_macros() -> String {
    let request = offset_of!(SlotHeader, request);
    let answer = offset_of!(SlotHeader, answer);
    let offsets = [
        ("REQUEST", request + offset_of!(Request, epoch)),
        ("LAYER", request + offset_of!(Request, layer)),
        ("ROWS", request + offset_of!(Request, rows)),
        ("ROW_BYTES", request + offset_of!(Request, row_bytes)),
        ("TOP_K", request + offset_of!(Request, top_k)),
        ("DONE", answer + offset_of!(Answer, done)),
        ("STATUS", answer + offset_of!(Answer, status)),
        ("GPU_FAULT", offset_of!(SlotHeader, fault) + offset_of!(Fault, epoch)),
    ];
    let lines: Vec<_> = offsets.iter().map(|(name, at)| format!("#define LK_{name}_OFFSET {at}\n")).collect();
    lines.concat()
}

/// Sizes of a slot: header, `hidden_states`, `topk_ids`, `topk_weights`, output, each on a page of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotLayout {
    /// Rows that one send can hold.
    pub capacity_tokens: usize,
    /// Bytes of the widest row of `hidden_states`.
    pub max_row_bytes: usize,
    /// Most experts per row.
    pub max_top_k: usize,
    /// Byte offsets in the slot.
    pub hidden_states: usize,
    /// As above.
    pub topk_ids: usize,
    /// As above.
    pub topk_weights: usize,
    /// As above.
    pub output: usize,
    /// Bytes of the whole slot.
    pub bytes: usize,
}

/// Payload parts start on pages, so that a row's alignment is that of its width.
const PART_ALIGN_BYTES: usize = 4096;

impl SlotLayout {
    /// # Errors
    /// [`Error::Shape`] when a size is 0 or the slot exceeds what the kernels index (2^31 elements).
    pub fn new(capacity_tokens: usize, max_row_bytes: usize, max_top_k: usize) -> Result<Self> {
        let limit = 1usize << 31;
        let too_large = || {
            Error::Shape(format!(
                "a hand-over slot of {capacity_tokens} rows of {max_row_bytes} bytes with {max_top_k} experts is empty \
                 or exceeds 2^31 units: lower max_num_batched_tokens"
            ))
        };
        let rows = capacity_tokens.checked_mul(max_row_bytes).filter(|&b| b > 0 && b / 2 < limit);
        let pairs = capacity_tokens.checked_mul(max_top_k).filter(|&n| n > 0 && n < limit);
        let (Some(rows), Some(pairs)) = (rows, pairs) else { return Err(too_large()) };
        let mut at = 0;
        let mut part = |bytes: usize| {
            let start = at;
            at += bytes.next_multiple_of(PART_ALIGN_BYTES);
            start
        };
        part(size_of::<SlotHeader>());
        let hidden_states = part(rows);
        let topk_ids = part(pairs * size_of::<i32>());
        let topk_weights = part(pairs * size_of::<f32>());
        let output = part(rows);
        Ok(Self {
            capacity_tokens,
            max_row_bytes,
            max_top_k,
            hidden_states,
            topk_ids,
            topk_weights,
            output,
            bytes: at,
        })
    }
}

/// One slot in memory that both sides see; the memory outlives it (`Mailbox` owns both).
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    base: NonNull<u8>,
    layout: SlotLayout,
}

// SAFETY: the header is atomics; the payload is handed out by `payload`, whose contract makes access exclusive.
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

/// The payload of one request.
#[derive(Debug)]
pub struct Payload<'a> {
    /// `[rows, row_bytes]`.
    pub hidden_states: &'a [u8],
    /// `[rows, top_k]`, -1 for padding.
    pub topk_ids: &'a [i32],
    /// `[rows, top_k]`.
    pub topk_weights: &'a [f32],
    /// `[rows, row_bytes]`.
    pub output: &'a mut [u8],
}

impl Slot {
    /// # Safety
    /// `layout.bytes` bytes at `base` are mapped, zeroed, page-aligned, and stay so as long as the slot is used.
    pub unsafe fn new(base: NonNull<u8>, layout: SlotLayout) -> Self {
        Self { base, layout }
    }

    /// Sizes and offsets.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Start of the slot.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The flags.
    pub fn header(&self) -> &SlotHeader {
        // SAFETY: mapped, page-aligned and zeroed (valid atomics) by `new`'s contract.
        unsafe { self.base.cast::<SlotHeader>().as_ref() }
    }

    /// The payload of a request of so many rows, or what does not fit about the numbers.
    ///
    /// # Errors
    /// [`Error::Handover`] when rows, `row_bytes` or `top_k` exceed the slot.
    ///
    /// # Safety
    /// The caller has acquired the request's epoch and has not answered it yet: until then the GPU neither reads nor
    /// writes the payload (it stops using the slot for good when it gives up waiting).
    pub unsafe fn payload(&self, rows: usize, row_bytes: usize, top_k: usize) -> Result<Payload<'_>> {
        let layout = &self.layout;
        if rows > layout.capacity_tokens || row_bytes > layout.max_row_bytes || top_k > layout.max_top_k {
            return Err(Error::Handover(format!(
                "a request of {rows} rows of {row_bytes} bytes with {top_k} experts exceeds the slot of {} rows of {} \
                 bytes with {} experts",
                layout.capacity_tokens, layout.max_row_bytes, layout.max_top_k
            )));
        }
        let part = |offset: usize| self.base.as_ptr().wrapping_add(offset);
        // SAFETY: the parts lie in the slot one after another (`SlotLayout::new`), the sizes are within them, and access is
        // exclusive by the caller's contract. Any bytes are valid u8, i32 and f32; parts are page-aligned.
        unsafe {
            Ok(Payload {
                hidden_states: std::slice::from_raw_parts(part(layout.hidden_states), rows * row_bytes),
                topk_ids: std::slice::from_raw_parts(part(layout.topk_ids).cast(), rows * top_k),
                topk_weights: std::slice::from_raw_parts(part(layout.topk_weights).cast(), rows * top_k),
                output: std::slice::from_raw_parts_mut(part(layout.output), rows * row_bytes),
            })
        }
    }

    /// Answers `epoch`. Never takes back the end of the hand-over, which another thread may have declared meanwhile.
    pub fn answer(&self, epoch: u64) {
        self.header().answer.done.fetch_max(epoch, Ordering::Release);
    }

    /// Ends the hand-over: every present and later wait returns, and finds `status`.
    pub fn end(&self, status: u32) {
        let answer = &self.header().answer;
        // The first reason stays.
        let _ = answer.status.compare_exchange(0, status, Ordering::Release, Ordering::Relaxed);
        answer.done.store(u64::MAX, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for (tokens, row, k) in [(1, 2, 1), (8192, 14336, 8), (7, 260, 3), (4096, 28672, 22)] {
            let l = SlotLayout::new(tokens, row, k).unwrap();
            let parts = [
                (0, size_of::<SlotHeader>()),
                (l.hidden_states, tokens * row),
                (l.topk_ids, tokens * k * 4),
                (l.topk_weights, tokens * k * 4),
                (l.output, tokens * row),
                (l.bytes, 0),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{l:?}");
                assert!(pair[1].0.is_multiple_of(PART_ALIGN_BYTES));
            }
        }
    }

    #[test]
    fn sizes_that_kernels_cannot_index_are_refused() {
        for (tokens, row, k) in [(0, 2, 1), (1, 0, 1), (1, 2, 0), (1 << 20, 1 << 14, 1), (usize::MAX, 8, 8)] {
            assert!(SlotLayout::new(tokens, row, k).is_err(), "{tokens} {row} {k}");
        }
    }

    #[test]
    fn macros_name_every_flag_once() {
        let text = header_macros();
        let mut offsets: Vec<usize> =
            text.lines().map(|l| l.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        let count = offsets.len();
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!((offsets.len(), count), (8, 8), "{text}");
    }
}
