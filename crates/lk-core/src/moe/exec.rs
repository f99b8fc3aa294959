//! The job that the workers run: gate/up, activation, down, weighted reduction.
//!
//! Phases, with one barrier between each two:
//! 1. *gate/up*: a task is one unit (32 rows of `intermediate_size`) of one expert; it reads the unit's panels
//!    once, applies bias and activation and writes `h[pair, unit]`;
//! 2. *down*: a task is one or two panels of `hidden_size`; it walks over the experts of the step in ascending
//!    order, so the sum of a column has one order whoever computes it, and writes the output (one node) or the
//!    node's partial sum;
//! 3. *reduce*, only with several nodes: adds the partial sums in node order.
#![expect(unsafe_code, reason = "workers write disjoint parts of scratch that they share")]

use std::ops::Range;

use crate::kernel::{Kernel, Operand, OutRow, Rows, VecOps};
use crate::pool::Worker;
use crate::{Dtype, Result};

use super::route::{ActiveExpert, Routing};
use super::scratch::{NodeScratch, PANEL, ROW_BLOCK, Scratch, Shared};
use super::weights::{NodeWeights, Weights};

/// Rows of `hidden_states` in one operand type, by token or by pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct XRows<'a> {
    pub(super) rows: Rows<'a>,
    /// Rows are indexed by pair (gathered, or scaled by the router weight) instead of by token.
    pub(super) by_pair: bool,
}

/// One step of one layer, borrowed by all workers.
pub(super) struct Step<'a> {
    pub(super) weights: &'a Weights,
    pub(super) ops: &'static VecOps,
    pub(super) routing: &'a Routing,
    pub(super) num_tokens: usize,
    pub(super) x_f32: Option<XRows<'a>>,
    pub(super) x_bf16: Option<XRows<'a>>,
    pub(super) scratch: &'a Scratch,
    pub(super) out: Shared<u8>,
    pub(super) dtype: Dtype,
}

// SAFETY: all fields are shared reads but `scratch` and `out`, whose parts are written by the one worker that
// claimed the task they belong to (`StealRange` hands out each task once) and read only after a barrier.
unsafe impl Sync for Step<'_> {}

impl Step<'_> {
    /// One worker's part of the step.
    pub(super) fn run(&self, worker: &Worker<'_>) -> Result<()> {
        let node = &self.scratch.nodes[worker.node];
        let weights = &self.weights.nodes[worker.node];
        while let Some(task) = node.gate_up.claim(worker.index_in_node) {
            self.gate_up(worker, node, weights, task);
            worker.progress();
        }
        worker.node_barrier()?;
        while let Some(task) = node.down.claim(worker.index_in_node) {
            self.down(worker, node, weights, task);
            worker.progress();
        }
        if worker.nodes > 1 {
            worker.root_barrier()?;
            self.reduce(worker);
        }
        Ok(())
    }

    /// Rows of `hidden_states` of a block of pairs.
    fn x_rows(&self, operand: Operand, block: Range<usize>) -> Rows<'_> {
        let x = match operand {
            Operand::Bf16 => self.x_bf16,
            Operand::F32 => self.x_f32,
        }
        .expect("the step prepares every operand that its kernels want");
        if x.by_pair {
            x.rows.range(block.start, block.len())
        } else {
            x.rows.pick(&self.routing.tokens[block])
        }
    }

    /// Gate, up and activation of one unit for all rows of its expert.
    fn gate_up(&self, worker: &Worker<'_>, node: &NodeScratch, weights: &NodeWeights, task: usize) {
        let (active, unit) = node.locate(task);
        let active = self.routing.active[active];
        let slot = weights.slot(active.expert);
        let slice = &weights.slices[slot.slice];
        let m = active.len as usize;
        let kernel = self.weights.gate_up.select(m);
        let down_operand = self.weights.down.select(m).operand();
        let act = &self.weights.activation;
        let shards = if act.gated { 2 } else { 1 };
        let bytes = slice.w13.panel_bytes();
        let gate_panel = weights.panel(slot.w13 + shards * unit * bytes, bytes);
        // SAFETY: a worker's scratch is used by that worker alone.
        let own = unsafe { self.scratch.worker(worker.index) };
        for block in blocks(active) {
            let values = block.len() * PANEL;
            let rows = self.x_rows(kernel.operand(), block.clone());
            let gate = &mut own.gate[..values];
            let up: &[f32] = if act.gated {
                let up = &mut own.up[..values];
                let up_panel = weights.panel(slot.w13 + (2 * unit + 1) * bytes, bytes);
                kernel.run2([gate_panel, up_panel], &slice.w13, &rows, [gate, up]);
                if let Some(bias) = weights.up_bias(slot, unit) {
                    add_bias(up, bias);
                }
                up
            } else {
                kernel.run(gate_panel, &slice.w13, &rows, gate);
                &[]
            };
            if let Some(bias) = weights.gate_bias(slot, unit) {
                add_bias(gate, bias);
            }
            self.ops.activate(act, gate, up, &mut own.act[..values]);
            for (i, pair) in block.enumerate() {
                let values = &own.act[i * PANEL..(i + 1) * PANEL];
                let (at, len) = node.h_cell(pair, unit, down_operand);
                // SAFETY: the cell (pair, unit) belongs to this task.
                let cell = unsafe { node.h.range(at, len) };
                store(self.ops, operand_dtype(down_operand), &[values], cell);
            }
        }
    }

    /// The columns of one task of `hidden_size`, summed over the experts of the step.
    fn down(&self, worker: &Worker<'_>, node: &NodeScratch, weights: &NodeWeights, task: usize) {
        let hidden_size = self.weights.hidden_size;
        // SAFETY: a worker's scratch is used by that worker alone.
        let own = unsafe { self.scratch.worker(worker.index) };
        let panels = self.scratch.down_panels(task, hidden_size.div_ceil(PANEL));
        let width = panels.len() * PANEL;
        let acc = &mut own.acc[..self.num_tokens * width];
        acc.fill(0.0);
        for &active in &self.routing.active {
            let slot = weights.slot(active.expert);
            if slot.is_empty() {
                continue;
            }
            let slice = &weights.slices[slot.slice];
            let kernel: &Kernel = self.weights.down.select(active.len as usize);
            for block in blocks(active) {
                let rows = node.h_rows(kernel.operand(), block.clone(), slice.w2.k_padded());
                for (i, panel) in panels.clone().enumerate() {
                    let tile = &mut own.gate[..block.len() * PANEL];
                    let at = slot.w2 + panel * slice.w2.panel_bytes();
                    kernel.run(weights.panel(at, slice.w2.panel_bytes()), &slice.w2, &rows, tile);
                    if let Some(bias) = weights.w2_bias(slot, panel) {
                        add_bias(tile, bias);
                    }
                    for (r, pair) in block.clone().enumerate() {
                        let to = self.routing.tokens[pair] as usize * width + i * PANEL;
                        let weight =
                            if self.weights.weight_on_input { 1.0 } else { self.routing.weights[pair] };
                        self.ops.axpy(weight, &tile[r * PANEL..(r + 1) * PANEL], &mut acc[to..to + PANEL]);
                    }
                }
            }
        }
        let first = panels.start * PANEL;
        let columns = width.min(hidden_size - first);
        for token in 0..self.num_tokens {
            let values = &acc[token * width..token * width + columns];
            if worker.nodes == 1 {
                let size = self.dtype.bytes();
                // SAFETY: these columns of the output belong to this task.
                let cell = unsafe { self.out.range((token * hidden_size + first) * size, columns * size) };
                store(self.ops, self.dtype, &[values], cell);
            } else {
                // SAFETY: these columns of the node's partial sums belong to this task.
                let cell = unsafe { node.partial.range(token * hidden_size + first, columns) };
                cell.copy_from_slice(values);
            }
        }
    }

    /// Adds the nodes' partial sums over this worker's part of the output.
    fn reduce(&self, worker: &Worker<'_>) {
        const CHUNK: usize = 1024;
        let total = self.num_tokens * self.weights.hidden_size;
        let chunks = total.div_ceil(CHUNK);
        let size = self.dtype.bytes();
        let mut sum = [0.0f32; CHUNK];
        for chunk in worker.index * chunks / worker.workers..(worker.index + 1) * chunks / worker.workers {
            let at = chunk * CHUNK;
            let len = CHUNK.min(total - at);
            sum[..len].fill(0.0);
            for node in &self.scratch.nodes {
                // SAFETY: nobody writes partial sums after the root barrier.
                self.ops.add(unsafe { node.partial.range(at, len) }, &mut sum[..len]);
            }
            // SAFETY: chunks are disjoint and each belongs to one worker.
            let cell = unsafe { self.out.range(at * size, len * size) };
            store(self.ops, self.dtype, &[&sum[..len]], cell);
        }
    }
}

/// The pairs of one expert in blocks of at most [`ROW_BLOCK`] rows.
fn blocks(active: ActiveExpert) -> impl Iterator<Item = Range<usize>> {
    let pairs = active.pairs();
    pairs.clone().step_by(ROW_BLOCK).map(move |at| at..(at + ROW_BLOCK).min(pairs.end))
}

/// Adds one panel of f32 bias, as it lies in the arena, to every row.
fn add_bias(tile: &mut [f32], bias: &[u8]) {
    for row in tile.chunks_exact_mut(PANEL) {
        row.iter_mut().zip(bias.as_chunks::<4>().0).for_each(|(t, b)| *t += f32::from_ne_bytes(*b));
    }
}

const fn operand_dtype(operand: Operand) -> Dtype {
    match operand {
        Operand::Bf16 => Dtype::Bf16,
        Operand::F32 => Dtype::F32,
    }
}

/// Sums rows of f32 and rounds once to `dtype`; `to` is aligned to its elements.
pub(super) fn store(ops: &VecOps, dtype: Dtype, parts: &[&[f32]], to: &mut [u8]) {
    // SAFETY: f32 and u16 have no invalid values; `align_to_mut` splits off what is not aligned, and the assertions see
    // that nothing was.
    let out = unsafe {
        if dtype == Dtype::F32 {
            let (head, body, tail) = to.align_to_mut::<f32>();
            assert!(head.is_empty() && tail.is_empty(), "output is not aligned");
            OutRow::F32(body)
        } else {
            let (head, body, tail) = to.align_to_mut::<u16>();
            assert!(head.is_empty() && tail.is_empty(), "output is not aligned");
            if dtype == Dtype::Bf16 { OutRow::Bf16(body) } else { OutRow::F16(body) }
        }
    };
    ops.reduce(parts, out);
}
