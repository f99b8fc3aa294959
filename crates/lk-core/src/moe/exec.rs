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

use crate::kernel::{Kernel, Operand, VecOps};
use crate::pool::Worker;
use crate::{Dtype, Result};

use super::route::{ActiveExpert, Routing};
use super::scratch::{NodeScratch, PANEL, ROW_BLOCK, Scratch, Shared};
use super::weights::{NodeWeights, Weights};

/// Where the rows of `hidden_states` lie in one operand type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    base: *const u8,
    stride_bytes: usize,
    /// Rows are indexed by pair (gathered, or scaled by the router weight) instead of by token.
    by_pair: bool,
}

impl Rows {
    pub(super) const fn new(base: *const u8, stride_bytes: usize, by_pair: bool) -> Self {
        Self { base, stride_bytes, by_pair }
    }

    fn row(&self, pair: usize, routing: &Routing) -> *const u8 {
        let index = if self.by_pair { pair } else { routing.tokens[pair] as usize };
        // The caller sized the array for every token and pair of the step.
        self.base.wrapping_add(index * self.stride_bytes)
    }
}

/// One step of one layer, borrowed by all workers.
pub(super) struct Step<'a> {
    pub(super) weights: &'a Weights,
    pub(super) ops: &'static VecOps,
    pub(super) routing: &'a Routing,
    pub(super) num_tokens: usize,
    pub(super) x_f32: Option<Rows>,
    pub(super) x_bf16: Option<Rows>,
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

    fn rows(&self, operand: Operand) -> Rows {
        match operand {
            Operand::Bf16 => self.x_bf16,
            _ => self.x_f32,
        }
        .expect("the step prepares every operand that its kernels want")
    }

    /// Gate, up and activation of one unit for all rows of its expert.
    fn gate_up(&self, worker: &Worker<'_>, node: &NodeScratch, weights: &NodeWeights, task: usize) {
        let (active, unit) = node.locate(task);
        let active = self.routing.active[active];
        let slot = weights.slot(active.expert);
        let slice = &weights.slices[slot.slice];
        let m = active.len as usize;
        let kernel = self.weights.gate_up.select(m);
        let down_operand = self.weights.down.select(m).operand;
        let x = self.rows(kernel.operand);
        // SAFETY: a worker's scratch is used by that worker alone.
        let own = unsafe { self.scratch.worker(worker.index) };
        for block in blocks(active) {
            let rows = block.len();
            own.rows.clear();
            own.rows.extend(block.clone().map(|pair| x.row(pair, self.routing)));
            let gate = &mut own.gate[..rows * PANEL];
            let up = &mut own.up[..rows * PANEL];
            let act = &self.weights.activation;
            if act.is_gated() {
                let (g, u) = (weights.panel(slot.w13 + 2 * unit * slice.w13.panel_bytes(), slice.w13.panel_bytes()),
                              weights.panel(slot.w13 + (2 * unit + 1) * slice.w13.panel_bytes(), slice.w13.panel_bytes()));
                kernel.run2(g, u, &slice.w13, &own.rows, gate, up);
                if let Some(bias) = weights.gate_bias(slot, unit) {
                    add_bias(gate, bias);
                }
                if let Some(bias) = weights.up_bias(slot, unit) {
                    add_bias(up, bias);
                }
                self.ops.activate(act, gate, up, &mut own.act[..rows * PANEL]);
            } else {
                kernel.run(weights.panel(slot.w13 + unit * slice.w13.panel_bytes(), slice.w13.panel_bytes()), &slice.w13, &own.rows, gate);
                if let Some(bias) = weights.gate_bias(slot, unit) {
                    add_bias(gate, bias);
                }
                self.ops.activate(act, gate, &[], &mut own.act[..rows * PANEL]);
            }
            for (i, pair) in block.enumerate() {
                let values = &own.act[i * PANEL..(i + 1) * PANEL];
                let (at, len) = node.h_cell(pair, unit, down_operand);
                // SAFETY: the cell (pair, unit) belongs to this task.
                let cell = unsafe { node.h.range(at, len) };
                self.ops.store(operand_dtype(down_operand), values, cell);
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
                own.rows.clear();
                own.rows.extend(block.clone().map(|pair| node.h_row(pair)));
                for (i, panel) in panels.clone().enumerate() {
                    let tile = &mut own.gate[..block.len() * PANEL];
                    let at = slot.w2 + panel * slice.w2.panel_bytes();
                    kernel.run(weights.panel(at, slice.w2.panel_bytes()), &slice.w2, &own.rows, tile);
                    if let Some(bias) = weights.w2_bias(slot, panel) {
                        add_bias(tile, bias);
                    }
                    for (r, pair) in block.clone().enumerate() {
                        let to = self.routing.tokens[pair] as usize * width + i * PANEL;
                        let weight = if self.weights.weight_on_input { 1.0 } else { self.routing.weights[pair] };
                        self.ops.axpy32(weight, &tile[r * PANEL..(r + 1) * PANEL], &mut acc[to..to + PANEL]);
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
                self.ops.store(self.dtype, values, cell);
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
                let part = unsafe { node.partial.range(at, len) };
                sum[..len].iter_mut().zip(part.iter()).for_each(|(s, p)| *s += p);
            }
            // SAFETY: chunks are disjoint and each belongs to one worker.
            let cell = unsafe { self.out.range(at * size, len * size) };
            self.ops.store(self.dtype, &sum[..len], cell);
        }
    }
}

/// The pairs of one expert in blocks of at most [`ROW_BLOCK`] rows.
fn blocks(active: ActiveExpert) -> impl Iterator<Item = std::ops::Range<usize>> {
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
        _ => Dtype::F32,
    }
}
