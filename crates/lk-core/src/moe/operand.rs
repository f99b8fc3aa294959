//! Rows of `hidden_states` in the operand types that the kernels of a step want.
#![expect(unsafe_code, reason = "workers convert disjoint rows of shared buffers")]

use crate::kernel::VecOps;
use crate::mem::{AlignedVec, Scalar};
use crate::pool::Worker;
use crate::{Dtype, Result};

use super::exec::Rows;
use super::route::Routing;
use super::scratch::{Scratch, Shared, grow};
use super::spec::LayerSpec;

/// Elements below which handing rows out to the workers costs more than converting them on the spot.
const SERIAL_ELEMENTS: usize = 32 * 1024;

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
pub(super) fn prepare(
    request: &Request<'_>,
    (want_f32, want_bf16): (bool, bool),
    scratch: &mut Scratch,
    run: impl Fn(&(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()>,
) -> Result<(Option<Rows>, Option<Rows>)> {
    let spec = request.spec;
    let as_it_lies = |dtype: Dtype| {
        spec.dtype == dtype
            && request.k_padded == spec.hidden_size
            && !spec.router_weight_on_input
            && request.hidden_states.as_ptr().addr().is_multiple_of(dtype.bytes())
    };
    let direct = || Rows::new(request.hidden_states.as_ptr(), spec.hidden_size * spec.dtype.bytes(), false);
    let Scratch { routing, x_f32, x_bf16, .. } = scratch;
    let f32_rows = if !want_f32 {
        None
    } else if as_it_lies(Dtype::F32) {
        Some(direct())
    } else {
        Some(convert(request, routing, x_f32, spec.router_weight_on_input, &run)?)
    };
    let bf16_rows = if !want_bf16 {
        None
    } else if as_it_lies(Dtype::Bf16) && !request.gather {
        Some(direct())
    } else {
        Some(convert(request, routing, x_bf16, request.gather || spec.router_weight_on_input, &run)?)
    };
    Ok((f32_rows, bf16_rows))
}

/// An element type that operands have.
trait OperandElement: Scalar + Default {
    const DTYPE: Dtype;
}

impl OperandElement for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

/// Bits of a bf16.
impl OperandElement for u16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

fn convert<T: OperandElement>(
    request: &Request<'_>,
    routing: &Routing,
    buffer: &mut AlignedVec<T>,
    by_pair: bool,
    run: impl Fn(&(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()>,
) -> Result<Rows> {
    let stride = row_stride(request.k_padded, size_of::<T>());
    let rows = if by_pair { routing.num_pairs() } else { request.num_tokens };
    grow(buffer, rows * stride);
    let base = buffer.as_ptr().cast::<u8>();
    let to = Shared::new(&mut buffer[..rows * stride]);
    let row_bytes = request.spec.hidden_size * request.spec.dtype.bytes();
    let fill = |range: std::ops::Range<usize>| {
        for row in range {
            let token = if by_pair { routing.tokens[row] as usize } else { row };
            let scale = if request.spec.router_weight_on_input { routing.weights[row] } else { 1.0 };
            let from = &request.hidden_states[token * row_bytes..(token + 1) * row_bytes];
            // SAFETY: each row belongs to one range and each range to one worker.
            let to = unsafe { to.range(row * stride, request.k_padded) };
            let (body, tail) = to.split_at_mut(request.spec.hidden_size);
            // SAFETY: plain numbers may be written as bytes.
            let body = unsafe { std::slice::from_raw_parts_mut(body.as_mut_ptr().cast::<u8>(), size_of_val(body)) };
            request.ops.convert(request.spec.dtype, from, scale, T::DTYPE, body);
            tail.fill(T::default());
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
    Ok(Rows::new(base, stride * size_of::<T>(), by_pair))
}
