//! Buffers of a step, reused by all layers of an engine and grown by the caller before the workers start.
#![expect(unsafe_code, reason = "workers write disjoint parts of scratch that they share")]

use std::cell::UnsafeCell;
use std::ops::Range;

use crate::kernel::{Operand, Rows};
use crate::mem::{AlignedVec, Scalar};
use crate::pool::StealRange;

use super::operand::row_stride;
use super::route::Routing;
use super::weights::Weights;

/// Output channels of one panel.
pub(super) const PANEL: usize = crate::tile::NR;

/// Rows that one kernel call computes before bias and activation: the two tiles then stay in L1.
pub(super) const ROW_BLOCK: usize = 64;

/// Tokens that one job takes; longer inputs are cut so that a column's sums stay in L2.
pub(super) const MAX_STEP_TOKENS: usize = 4096;

/// A raw slice whose disjoint parts different workers write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared<T> {
    base: *mut T,
    len: usize,
}

// SAFETY: access goes through `range`, whose callers guarantee disjointness.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn new(slice: &mut [T]) -> Self {
        Self { base: slice.as_mut_ptr(), len: slice.len() }
    }

    /// # Safety
    /// The slice given to `new` lives, and no other reference to this part of it is in use.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's contract")]
    pub(super) unsafe fn range(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at}+{len} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

/// Buffers of one worker.
pub(super) struct WorkerScratch {
    pub(super) gate: AlignedVec<f32>,
    pub(super) up: AlignedVec<f32>,
    pub(super) act: AlignedVec<f32>,
    pub(super) acc: AlignedVec<f32>,
}

/// Buffers and task lists of one node.
pub(super) struct NodeScratch {
    /// Activated intermediate rows `[pairs, h_stride]` bytes, each row in its expert's operand type.
    h_buffer: AlignedVec<u8>,
    pub(super) h: Shared<u8>,
    h_stride: usize,
    partial_buffer: AlignedVec<f32>,
    /// Partial sums `[tokens, hidden_size]`, used with several nodes.
    pub(super) partial: Shared<f32>,
    /// First gate/up task of each active expert, then the number of tasks.
    first_task: Vec<usize>,
    pub(super) gate_up: StealRange,
    pub(super) down: StealRange,
}

impl NodeScratch {
    /// Active expert (index) and unit of a gate/up task.
    pub(super) fn locate(&self, task: usize) -> (usize, usize) {
        let active = self.first_task.partition_point(|&first| first <= task) - 1;
        (active, task - self.first_task[active])
    }

    /// Byte range of (pair, unit) in `h`.
    pub(super) fn h_cell(&self, pair: usize, unit: usize, operand: Operand) -> (usize, usize) {
        let size = operand.bytes();
        (pair * self.h_stride + unit * PANEL * size, PANEL * size)
    }

    /// Rows of `h` of a block of pairs.
    pub(super) fn h_rows(&self, operand: Operand, block: Range<usize>, width: usize) -> Rows<'_> {
        assert!(block.end * self.h_stride <= self.h.len && width * operand.bytes() <= self.h_stride);
        let base = self.h.base.wrapping_add(block.start * self.h_stride);
        // SAFETY: the assertion keeps the rows inside the buffer; they were written before the node's barrier and are
        // only read after it.
        unsafe { Rows::from_raw(base, operand, block.len(), width, self.h_stride) }
    }
}

/// Converted rows of `hidden_states`.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) x_f32: AlignedVec<f32>,
    pub(super) x_bf16: AlignedVec<u16>,
}

/// Scratch of an engine.
pub struct Scratch {
    pub(super) routing: Routing,
    pub(super) operands: Buffers,
    pub(super) nodes: Vec<NodeScratch>,
    workers: Vec<UnsafeCell<WorkerScratch>>,
    /// Panels per down task of the current step.
    down_width: usize,
}

// SAFETY: `workers` cells are used by their own worker only (`Scratch::worker`).
unsafe impl Sync for Scratch {}
// SAFETY: as above.
unsafe impl Send for Scratch {}

/// Makes room for `len` elements; what was there is lost when the buffer has to move.
pub(super) fn grow<T: Scalar>(buffer: &mut AlignedVec<T>, len: usize) {
    if buffer.len() < len {
        *buffer = AlignedVec::zeroed(len.max(buffer.len() * 3 / 2));
    }
}

impl Scratch {
    /// Scratch for a pool with so many workers on each node.
    pub fn new(workers_of_node: &[usize]) -> Self {
        let empty = || AlignedVec::zeroed(0);
        let worker = || {
            UnsafeCell::new(WorkerScratch {
                gate: AlignedVec::zeroed(ROW_BLOCK * PANEL),
                up: AlignedVec::zeroed(ROW_BLOCK * PANEL),
                act: AlignedVec::zeroed(ROW_BLOCK * PANEL),
                acc: empty(),
            })
        };
        Self {
            routing: Routing::default(),
            operands: Buffers { x_f32: empty(), x_bf16: AlignedVec::zeroed(0) },
            nodes: workers_of_node
                .iter()
                .map(|&workers| NodeScratch {
                    h_buffer: AlignedVec::zeroed(0),
                    h: Shared::new(&mut []),
                    h_stride: 0,
                    partial_buffer: empty(),
                    partial: Shared::new(&mut []),
                    first_task: Vec::new(),
                    gate_up: StealRange::new(workers),
                    down: StealRange::new(workers),
                })
                .collect(),
            workers: workers_of_node.iter().flat_map(|&n| (0..n).map(|_| worker())).collect(),
            down_width: 1,
        }
    }

    /// # Safety
    /// Only worker `index` of the job that is running calls this, and drops the reference before its next call.
    #[expect(clippy::mut_from_ref, reason = "one worker, one cell")]
    pub(super) unsafe fn worker(&self, index: usize) -> &mut WorkerScratch {
        // SAFETY: the cell is this worker's alone by the caller's contract.
        unsafe { &mut *self.workers[index].get() }
    }

    /// Panels of a down task.
    pub(super) fn down_panels(&self, task: usize, panels: usize) -> Range<usize> {
        task * self.down_width..((task + 1) * self.down_width).min(panels)
    }

    /// Sizes every buffer for the routed step and deals the tasks; allocates only when a step is the largest yet.
    pub(super) fn prepare(&mut self, weights: &Weights, num_tokens: usize) {
        let pairs = self.routing.num_pairs();
        let panels = weights.hidden_size.div_ceil(PANEL);
        let widest = self.routing.active.iter().map(|a| a.len).max().unwrap_or(0);
        // Two panels share one reading of h where the arithmetic, not the weights' bytes, sets the time.
        self.down_width = if widest >= 16 && panels >= 8 * self.workers.len() { 2 } else { 1 };
        for worker in &mut self.workers {
            grow(&mut worker.get_mut().acc, num_tokens * self.down_width * PANEL);
        }
        let several = self.nodes.len() > 1;
        for (index, node) in self.nodes.iter_mut().enumerate() {
            let held = &weights.nodes[index];
            node.h_stride = row_stride(held.h_columns(), size_of::<f32>()) * size_of::<f32>();
            grow(&mut node.h_buffer, pairs * node.h_stride);
            node.h = Shared::new(&mut node.h_buffer);
            if several {
                grow(&mut node.partial_buffer, num_tokens * weights.hidden_size);
                node.partial = Shared::new(&mut node.partial_buffer);
            }
            node.first_task.clear();
            let mut tasks = 0;
            for active in &self.routing.active {
                node.first_task.push(tasks);
                tasks += held.units(active.expert);
            }
            // Tasks of experts with many rows take longer; weighed, so that stealing has little left to do.
            let weight = |active: usize| 8 + self.routing.active[active].len as usize;
            let units = |active: usize| held.units(self.routing.active[active].expert);
            let total: usize = (0..self.routing.active.len()).map(|a| units(a) * weight(a)).sum();
            let owners = node.gate_up.owners();
            let first_task = &node.first_task;
            let bound = |owner: usize| -> usize {
                let goal = total * owner / owners;
                let mut sum = 0;
                for (active, &first) in first_task.iter().enumerate() {
                    let all = units(active) * weight(active);
                    if sum + all > goal {
                        return first + (goal - sum) / weight(active);
                    }
                    sum += all;
                }
                tasks
            };
            node.gate_up.reset_with(|owner| bound(owner)..bound(owner + 1));
            node.down.reset(panels.div_ceil(self.down_width));
        }
    }
}
