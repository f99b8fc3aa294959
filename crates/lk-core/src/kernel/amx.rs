//! Family `bf16amx`: bf16 rows and weights, f32 sums, on AMX tiles.
//!
//! Sixteen steps of half a panel are a B tile as they lie: 16 rows (pairs of `k`) of 16 channels, 128 bytes apart. An A tile
//! is up to 16 rows of `x`, 32 `k` each. Up to 16 rows use two accumulators per channel half, for even and odd blocks of
//! `k`, since a tile product waits for the previous one into the same tile; more rows use a 2 × 2 arrangement, which loads
//! each weight tile once for 32 rows.

use super::{Family, Kernel, Operand, TileArgs};
use crate::format::{CodeKind, WeightFormat};
use crate::simd::amx::{TileConfig, release};
use crate::simd::{Cpu, IsaLevel};
use crate::tile::{K_TILE, NR, STEP_BYTES};
use std::arch::asm;
use std::cell::RefCell;

/// Bytes of a panel from one block of `K_TILE` to the next.
pub(super) const BLOCK_BYTES: usize = K_TILE / 2 * STEP_BYTES;

/// `k` of a panel that several blocks of rows pass over before the next: 128 KiB of weights, which the second-level cache
/// holds beside the rows.
const K_CACHE: usize = 2048;

const OUT_STRIDE: usize = NR * 4;

thread_local! {
    /// Rows that do not lie at a constant stride are copied here.
    static GATHERED: RefCell<Vec<u16>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
///
/// As [`super::RunFn`].
unsafe fn run(a: &TileArgs<'_>) {
    let (m, k) = (a.rows.m(), a.layout.k_padded());
    // SAFETY: the caller's promise; rows are m times k_padded elements at the stride given.
    unsafe {
        with_strided_rows(a, |x, stride| tiles(a.panel, x, stride, m, k, a.out, Source::Memory));
        release();
    }
}

/// Calls `body` with the first row and the stride of the rows, copied if they do not lie at a constant one.
///
/// # Safety
///
/// As [`super::RunFn`].
pub(super) unsafe fn with_strided_rows(a: &TileArgs<'_>, body: impl FnOnce(*const u8, usize)) {
    if let Some(stride) = a.rows.stride_bytes() {
        return body(a.rows.row(0), stride);
    }
    let k = a.layout.k_padded();
    GATHERED.with_borrow_mut(|rows| {
        rows.clear();
        for r in 0..a.rows.m() {
            // SAFETY: the caller's promise: a row has k_padded elements.
            rows.extend_from_slice(unsafe { std::slice::from_raw_parts(a.rows.row(r).cast(), k) });
        }
        body(rows.as_ptr().cast(), k * 2);
    });
}

/// Where the bf16 weights of a call come from, and what will be read next.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// From memory: the first rows wait for it, the others leave time to fetch the next panel, which lies behind this one.
    Memory,
    /// From a buffer in the cache; the panel to fetch meanwhile, and its bytes.
    Buffer(*const u8, usize),
}

/// Lines that are asked for while tiles are multiplied.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    at: *const u8,
    /// Bytes for each block of `K_TILE`.
    per_block: usize,
}

impl Ahead {
    /// `bytes` from `at` on, spread over `blocks` blocks.
    pub(super) fn spread(at: *const u8, bytes: usize, blocks: usize) -> Self {
        Self { at, per_block: bytes.div_ceil(blocks.max(1)).next_multiple_of(64) }
    }

    /// Asks for the next lines, into the second-level cache. The addresses may lie outside of the panel.
    #[inline(always)]
    fn step(&mut self) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        for line in (0..self.per_block).step_by(64) {
            // SAFETY: a prefetch touches no memory architecturally and faults on no address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(line).cast()) };
        }
        self.at = self.at.wrapping_add(self.per_block);
    }
}

/// All rows, in blocks of up to 32.
///
/// # Safety
///
/// As [`super::RunFn`], with `m` rows of `k` bf16 at `x`, `stride` bytes apart; AMX is available.
pub(super) unsafe fn tiles(
    panel: *const u8,
    x: *const u8,
    stride: usize,
    m: usize,
    k: usize,
    out: *mut f32,
    source: Source,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if m <= 16 {
            TileConfig::new([m as u8, m as u8, m as u8, m as u8, m as u8, m as u8, 16, 16]).load();
            few(panel, x, stride, m, k, out);
            return;
        }
        let depth = if m <= 32 { k } else { K_CACHE };
        let (row_blocks, bytes) = (m.div_ceil(32), k / K_TILE * BLOCK_BYTES);
        let mut next = match source {
            Source::Memory => {
                Ahead::spread(panel.wrapping_add(bytes), bytes, (row_blocks - 1) * (k / K_TILE))
            }
            Source::Buffer(at, bytes) => Ahead::spread(at, bytes, row_blocks * (k / K_TILE)),
        };
        let mut second = usize::MAX;
        for k0 in (0..k).step_by(depth) {
            let k1 = (k0 + depth).min(k);
            for first in (0..m).step_by(32) {
                let rows = (m - first).min(32);
                let (x, out) = (x.add(first * stride), out.add(first * NR));
                let lower = rows.saturating_sub(16);
                if lower == 0 {
                    TileConfig::new([rows as u8, rows as u8, 0, 0, rows as u8, 0, 16, 16]).load();
                    second = usize::MAX;
                    next = one(panel, x, stride, k0, k1, out, next);
                    continue;
                }
                if lower != second {
                    let l = lower as u8;
                    TileConfig::new([16, 16, l, l, 16, l, 16, 16]).load();
                    second = lower;
                }
                if first == 0 && matches!(source, Source::Memory) {
                    let here = panel.add(k0 / K_TILE * BLOCK_BYTES).wrapping_add(PREFETCH_BYTES);
                    two(panel, x, stride, k0, k1, out, Ahead { at: here, per_block: BLOCK_BYTES });
                } else {
                    next = two(panel, x, stride, k0, k1, out, next);
                }
            }
        }
    }
}

/// Starts accumulators 0 and 1 (`16` rows) from `out`, or from zero at the first `k`.
macro_rules! start {
    ($c0:literal, $c1:literal, $fresh:expr, $out:expr) => {
        if $fresh {
            asm!(concat!("tilezero ", $c0), concat!("tilezero ", $c1), options(nostack, preserves_flags, nomem));
        } else {
            asm!(
                concat!("tileloadd ", $c0, ", [{out} + {stride}*1]"),
                concat!("tileloadd ", $c1, ", [{out} + {stride}*1 + 64]"),
                out = in(reg) $out, stride = in(reg) OUT_STRIDE,
                options(nostack, preserves_flags, readonly)
            );
        }
    };
}

macro_rules! finish {
    ($c0:literal, $c1:literal, $out:expr) => {
        asm!(
            concat!("tilestored [{out} + {stride}*1], ", $c0),
            concat!("tilestored [{out} + {stride}*1 + 64], ", $c1),
            out = in(reg) $out, stride = in(reg) OUT_STRIDE,
            options(nostack, preserves_flags)
        )
    };
}

/// One block of `K_TILE`: accumulators `$c0`, `$c1` += rows `$a` × both channel halves.
macro_rules! product {
    ($c0:literal, $c1:literal, $at:literal, $x:expr, $stride:expr, $b:expr) => {
        asm!(
            concat!("tileloadd ", $at, ", [{x} + {sx}*1]"),
            "tileloadd tmm6, [{b} + {sb}*1]",
            concat!("tdpbf16ps ", $c0, ", ", $at, ", tmm6"),
            "tileloadd tmm7, [{b} + {sb}*1 + 64]",
            concat!("tdpbf16ps ", $c1, ", ", $at, ", tmm7"),
            x = in(reg) $x, sx = in(reg) $stride, b = in(reg) $b, sb = in(reg) STEP_BYTES,
            options(nostack, preserves_flags, readonly)
        )
    };
}

/// At most 16 rows, whole `k`.
///
/// # Safety
///
/// As [`tiles`]; tiles 0 to 5 have `m` rows, 6 and 7 have 16, and 0 to 3 are zero.
unsafe fn few(panel: *const u8, x: *const u8, stride: usize, m: usize, k: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        add_few::<true>(panel, x, stride, k / K_TILE);
        store_few(m, out);
    }
}

/// Adds `blocks` blocks of `K_TILE` to tiles 0, 1 (even blocks) and 2, 3 (odd ones).
///
/// # Safety
///
/// As [`tiles`]; tiles 0 to 5 have the rows of the block, 6 and 7 have 16.
pub(super) unsafe fn add_few<const FROM_MEMORY: bool>(
    b: *const u8,
    x: *const u8,
    stride: usize,
    blocks: usize,
) {
    // SAFETY: the caller's promise covers every block.
    unsafe {
        for pair in 0..blocks / 2 {
            let (b, x) = (b.add(pair * 2 * BLOCK_BYTES), x.add(pair * 2 * K_TILE * 2));
            if FROM_MEMORY {
                prefetch(b.wrapping_add(PREFETCH_BYTES), 2 * BLOCK_BYTES);
            }
            product!("tmm0", "tmm1", "tmm4", x, stride, b);
            product!("tmm2", "tmm3", "tmm5", x.add(K_TILE * 2), stride, b.add(BLOCK_BYTES));
        }
        if blocks % 2 == 1 {
            let last = blocks - 1;
            product!("tmm0", "tmm1", "tmm4", x.add(last * K_TILE * 2), stride, b.add(last * BLOCK_BYTES));
        }
    }
}

/// Writes the two sums of [`add_few`] apart.
///
/// # Safety
///
/// As [`tiles`]; both hold the rows of the block.
pub(super) unsafe fn store_both(even: *mut f32, odd: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        finish!("tmm0", "tmm1", even);
        finish!("tmm2", "tmm3", odd);
    }
}

/// Writes the sums of [`add_few`], `m` rows.
///
/// # Safety
///
/// As [`tiles`].
pub(super) unsafe fn store_few(m: usize, out: *mut f32) {
    let mut odd = [0f32; 16 * NR];
    // SAFETY: the caller's promise; `odd` holds 16 rows of a panel's channels.
    unsafe {
        finish!("tmm0", "tmm1", out);
        finish!("tmm2", "tmm3", odd.as_mut_ptr());
        for (i, part) in odd[..m * NR].iter().enumerate() {
            *out.add(i) += part;
        }
    }
}

/// Zeroes tiles 0 to 3.
///
/// # Safety
///
/// AMX is configured on this thread.
pub(super) unsafe fn zero_few() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, preserves_flags, nomem)
        );
    }
}

/// Bytes ahead of the current block that are asked for: the weights come from memory once and in order.
const PREFETCH_BYTES: usize = 4096;

/// Asks for `bytes` from `p` on; the address may lie outside of the panel.
#[inline(always)]
fn prefetch(p: *const u8, bytes: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch touches no memory architecturally and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(line).cast()) };
    }
}

/// At most 16 rows over `k0 .. k1`, added to `out` unless `k0` is 0. Returns what is to be asked for next.
///
/// # Safety
///
/// As [`tiles`]; tiles 0, 1 and 4 have the rows of the block, 6 and 7 have 16.
pub(super) unsafe fn one(
    panel: *const u8,
    x: *const u8,
    stride: usize,
    k0: usize,
    k1: usize,
    out: *mut f32,
    mut ahead: Ahead,
) -> Ahead {
    // SAFETY: the caller's promise.
    unsafe {
        start!("tmm0", "tmm1", k0 == 0, out);
        for k in (k0..k1).step_by(K_TILE) {
            ahead.step();
            product!("tmm0", "tmm1", "tmm4", x.add(k * 2), stride, panel.add(k / K_TILE * BLOCK_BYTES));
        }
        finish!("tmm0", "tmm1", out);
    }
    ahead
}

/// 17 to 32 rows over `k0 .. k1`, added to `out` unless `k0` is 0. Returns what is to be asked for next.
///
/// # Safety
///
/// As [`tiles`]; tiles 0, 1, 4, 6 and 7 have 16 rows, 2, 3 and 5 the rest of the block.
pub(super) unsafe fn two(
    panel: *const u8,
    x: *const u8,
    stride: usize,
    k0: usize,
    k1: usize,
    out: *mut f32,
    mut ahead: Ahead,
) -> Ahead {
    // SAFETY: the caller's promise.
    unsafe {
        let (x1, out1) = (x.add(16 * stride), out.add(16 * NR));
        start!("tmm0", "tmm1", k0 == 0, out);
        start!("tmm2", "tmm3", k0 == 0, out1);
        for k in (k0..k1).step_by(K_TILE) {
            ahead.step();
            asm!(
                "tileloadd tmm4, [{x0} + {sx}*1]",
                "tileloadd tmm6, [{b} + {sb}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{x1} + {sx}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{b} + {sb}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                x0 = in(reg) x.add(k * 2), x1 = in(reg) x1.add(k * 2), sx = in(reg) stride,
                b = in(reg) panel.add(k / K_TILE * BLOCK_BYTES), sb = in(reg) STEP_BYTES,
                options(nostack, preserves_flags, readonly)
            );
        }
        finish!("tmm0", "tmm1", out);
        finish!("tmm2", "tmm3", out1);
    }
    ahead
}

/// Adds the kernels of this family that `cpu` can run.
pub(super) fn kernels(format: WeightFormat, cpu: Cpu, out: &mut Vec<Kernel>) {
    if cpu.amx() && format.code == CodeKind::Bf16 {
        out.push(Kernel::new(Family::Bf16Amx, IsaLevel::Amx, "amx", format, Operand::Bf16, 16, run));
    }
}
