//! Rows of `hidden_states` in the operand types that the kernels of a step want.
#![expect(unsafe_code, reason = "workers convert disjoint rows of shared buffers")]

use crate::kernel::{Operand, Rows, VecOps};
use crate::mem::{AlignedVec, Scalar};
use crate::pool::Worker;
use crate::{Dtype, Result};

use super::exec::{XRows, store};
use super::route::Routing;
use super::scratch::{Buffers, Shared, grow};
use super::spec::LayerSpec;

/// Elements below which handing rows out to the workers costs more than converting them on the spot.
const SERIAL_ELEMENTS: usize = 32 * 1024;

/// Elements that are converted at a time.
const CHUNK: usize = 1024;

/// What to prepare and from what.
pub(super) struct Request<'a> {
    pub(super) spec: &'a LayerSpec,
    pub(super) ops: &'static VecOps,
    pub(super) hidden_states: &'a [u8],
    pub(super) num_tokens: usize,
    /// Elements that kernels read of a row.
    pub(super) k_padded: usize,
    /// Whether a kernel wants the rows of an expert one after another.
    pub(super) gather: bool,
}

/// Row stride in elements: whole cache lines, and not a multiple of 4096 bytes, where the rows of a block would
/// fall into the same sets of L1.
pub(super) fn row_stride(elements: usize, element_bytes: usize) -> usize {
    let bytes = (elements * element_bytes).next_multiple_of(64);
    let bytes = if bytes.is_multiple_of(4096) { bytes + 64 } else { bytes };
    bytes / element_bytes
}

/// Returns the f32 and the bf16 rows that were asked for. Rows are used where they lie when dtype, width and order
/// allow it.
pub(super) fn prepare<'a>(
    request: &Request<'a>,
    (want_f32, want_bf16): (bool, bool),
    buffers: &'a mut Buffers,
    routing: &Routing,
    run: impl Fn(&(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()>,
) -> Result<(Option<XRows<'a>>, Option<XRows<'a>>)> {
    let spec = request.spec;
    let as_it_lies = |dtype: Dtype| {
        spec.dtype == dtype
            && request.k_padded == spec.hidden_size
            && !spec.router_weight_on_input
            && request.hidden_states.as_ptr().addr().is_multiple_of(dtype.bytes())
    };
    let direct = |operand: Operand| {
        let stride = spec.hidden_size * spec.dtype.bytes();
        // SAFETY: `hidden_states` holds `num_tokens` rows of `hidden_size` elements and is borrowed for 'a.
        let rows = unsafe {
            Rows::from_raw(
                request.hidden_states.as_ptr(),
                operand,
                request.num_tokens,
                spec.hidden_size,
                stride,
            )
        };
        XRows { rows, by_pair: false }
    };
    let Buffers { x_f32, x_bf16 } = buffers;
    let f32_rows = if !want_f32 {
        None
    } else if as_it_lies(Dtype::F32) {
        Some(direct(Operand::F32))
    } else {
        Some(convert(request, routing, x_f32, spec.router_weight_on_input, &run)?)
    };
    let bf16_rows = if !want_bf16 {
        None
    } else if as_it_lies(Dtype::Bf16) && !request.gather {
        Some(direct(Operand::Bf16))
    } else {
        Some(convert(request, routing, x_bf16, request.gather || spec.router_weight_on_input, &run)?)
    };
    Ok((f32_rows, bf16_rows))
}

/// An element type that operands have.
trait OperandElement: Scalar + Default {
    const DTYPE: Dtype;
    fn rows(data: &[Self], width: usize, stride: usize) -> Rows<'_>;
}

impl OperandElement for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn rows(data: &[Self], width: usize, stride: usize) -> Rows<'_> {
        Rows::f32(data, width, stride)
    }
}

/// Bits of a bf16.
impl OperandElement for u16 {
    const DTYPE: Dtype = Dtype::Bf16;
    fn rows(data: &[Self], width: usize, stride: usize) -> Rows<'_> {
        Rows::bf16(data, width, stride)
    }
}

fn convert<'a, T: OperandElement>(
    request: &Request<'_>,
    routing: &Routing,
    buffer: &'a mut AlignedVec<T>,
    by_pair: bool,
    run: impl Fn(&(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()>,
) -> Result<XRows<'a>> {
    let (spec, ops) = (request.spec, request.ops);
    let stride = row_stride(request.k_padded, size_of::<T>());
    let rows = if by_pair { routing.num_pairs() } else { request.num_tokens };
    grow(buffer, rows * stride);
    let to = Shared::new(&mut buffer[..rows * stride]);
    let row_bytes = spec.hidden_size * spec.dtype.bytes();
    let fill = |range: std::ops::Range<usize>| {
        let mut wide = [0.0f32; CHUNK];
        for row in range {
            let token = if by_pair { routing.tokens[row] as usize } else { row };
            let from = &request.hidden_states[token * row_bytes..(token + 1) * row_bytes];
            // SAFETY: each row belongs to one range and each range to one worker.
            let to = unsafe { to.range(row * stride, request.k_padded) };
            let (body, tail) = to.split_at_mut(spec.hidden_size);
            tail.fill(T::default());
            if spec.dtype == T::DTYPE && !spec.router_weight_on_input {
                // SAFETY: plain numbers may be written as bytes.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(body.as_mut_ptr().cast(), size_of_val(body)) };
                bytes.copy_from_slice(from);
                continue;
            }
            for (from, to) in from.chunks(CHUNK * spec.dtype.bytes()).zip(body.chunks_mut(CHUNK)) {
                let wide = &mut wide[..to.len()];
                widen(ops, spec.dtype, from, wide);
                if spec.router_weight_on_input {
                    ops.scale(routing.weights[row], wide);
                }
                // SAFETY: plain numbers may be written as bytes.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), size_of_val(to)) };
                store(ops, T::DTYPE, &[wide], bytes);
            }
        }
    };
    if rows * stride <= SERIAL_ELEMENTS {
        fill(0..rows);
    } else {
        run(&|worker: &Worker<'_>| {
            fill(worker.index * rows / worker.workers..(worker.index + 1) * rows / worker.workers);
            Ok(())
        })?;
    }
    Ok(XRows { rows: T::rows(&buffer[..rows * stride], request.k_padded, stride), by_pair })
}

/// Widens elements of `dtype` to f32.
fn widen(ops: &VecOps, dtype: Dtype, from: &[u8], to: &mut [f32]) {
    // SAFETY: u16 has no invalid values.
    let (head, halves, _) = unsafe { from.align_to::<u16>() };
    match dtype {
        Dtype::F32 => {
            to.iter_mut().zip(from.as_chunks::<4>().0).for_each(|(t, f)| *t = f32::from_ne_bytes(*f));
        }
        Dtype::Bf16 if head.is_empty() => ops.bf16_to_f32(halves, to),
        Dtype::F16 if head.is_empty() => ops.f16_to_f32(halves, to),
        Dtype::Bf16 => to
            .iter_mut()
            .zip(from.as_chunks::<2>().0)
            .for_each(|(t, f)| *t = half::bf16::from_ne_bytes(*f).to_f32()),
        _ => to
            .iter_mut()
            .zip(from.as_chunks::<2>().0)
            .for_each(|(t, f)| *t = half::f16::from_ne_bytes(*f).to_f32()),
    }
}
