//! From the tensors of one expert, as a checkpoint (or vLLM's parameter) holds them, to packed panels.
#![expect(unsafe_code, reason = "the workers of a node fill disjoint panels of its arena")]

use half::{bf16, f16};

use crate::mem::AlignedVec;
use crate::pool::{Pool, Worker};
use crate::tile::{CheckpointView, Grid, PackError, TileLayout, pack_panels};
use crate::{Dtype, Error, Result};

use super::scratch::PANEL;
use super::shard::ShardRule;
use super::spec::LayerSpec;
use super::weights::{NodeWeights, Slot};

/// A contiguous tensor of a checkpoint, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// One matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Matrix {
    Gate,
    Up,
    Down,
}

impl Matrix {
    const fn tensor(self) -> &'static str {
        match self {
            Self::Gate | Self::Up => "w13_weight",
            Self::Down => "w2_weight",
        }
    }
}

/// The tensors of one expert, checked against the layer.
struct Expert<'a> {
    spec: &'a LayerSpec,
    index: usize,
    tensors: &'a [(&'a str, TensorView<'a>)],
}

impl<'a> Expert<'a> {
    fn new(spec: &'a LayerSpec, index: usize, tensors: &'a [(&'a str, TensorView<'a>)]) -> Result<Self> {
        let expert = Self { spec, index, tensors };
        let (rows, hidden, inner) =
            (spec.w13_shards() * spec.intermediate_size, spec.hidden_size, spec.intermediate_size);
        let dtype = spec.tensor_dtype();
        expert.check("w13_weight", &[rows, hidden], dtype)?;
        expert.check("w2_weight", &[hidden, inner], dtype)?;
        if spec.w13_bias {
            expert.check("w13_bias", &[rows], None)?;
        }
        if spec.w2_bias {
            expert.check("w2_bias", &[hidden], None)?;
        }
        Ok(expert)
    }

    fn place(&self) -> String {
        format!("{}: expert {}", self.spec.name, self.index)
    }

    fn tensor(&self, name: &str) -> Result<TensorView<'a>> {
        self.tensors
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, t)| *t)
            .ok_or_else(|| Error::Missing(format!("{}: the checkpoint has no {name}", self.place())))
    }

    fn check(&self, name: &str, shape: &[usize], dtype: Option<Dtype>) -> Result<()> {
        let tensor = self.tensor(name)?;
        if tensor.shape != shape || dtype.is_some_and(|d| d != tensor.dtype) {
            return Err(Error::Shape(format!(
                "{}: {name} is {} {:?}, expected {} {shape:?} (format {}, hidden_size {}, intermediate_size {})",
                self.place(),
                tensor.dtype,
                tensor.shape,
                dtype.unwrap_or(tensor.dtype),
                self.spec.format,
                self.spec.hidden_size,
                self.spec.intermediate_size
            )));
        }
        Ok(())
    }

    /// The part of a matrix that a slot holds.
    fn view(&self, matrix: Matrix, slot: &Slot, rows: usize) -> Result<CheckpointView<'a>> {
        let spec = self.spec;
        let tensor = self.tensor(matrix.tensor())?;
        let size = tensor.dtype.bytes();
        let (grid, n, k) = match matrix {
            Matrix::Down => {
                let grid = Grid::rows(tensor.bytes, size, spec.intermediate_size);
                (grid.skip(0, slot.start), spec.hidden_size, rows)
            }
            Matrix::Gate | Matrix::Up => {
                let grid = Grid::rows(tensor.bytes, size, spec.hidden_size);
                let grid = match (matrix, spec.interleaved) {
                    (Matrix::Up, true) => grid.every(1, 2),
                    (_, true) => grid.every(0, 2),
                    (Matrix::Up, false) => grid.skip(spec.intermediate_size, 0),
                    (_, false) => grid,
                };
                (grid.skip(slot.start, 0), rows, spec.hidden_size)
            }
        };
        CheckpointView::plain(tensor.dtype, grid, n, k)
    }

    /// Bias rows in the order of the panels, f32, padded with zeros.
    fn bias(&self, matrix: Matrix, slot: &Slot, rows: usize) -> Result<Vec<u8>> {
        let spec = self.spec;
        let (name, first, step, rows) = match (matrix, spec.interleaved) {
            (Matrix::Down, _) => ("w2_bias", 0, 1, spec.hidden_size),
            (Matrix::Gate, false) => ("w13_bias", slot.start, 1, rows),
            (Matrix::Up, false) => ("w13_bias", spec.intermediate_size + slot.start, 1, rows),
            (Matrix::Gate, true) => ("w13_bias", 2 * slot.start, 2, rows),
            (Matrix::Up, true) => ("w13_bias", 2 * slot.start + 1, 2, rows),
        };
        let tensor = self.tensor(name)?;
        let mut out = vec![0u8; rows.next_multiple_of(PANEL) * size_of::<f32>()];
        for (i, to) in out.chunks_exact_mut(4).take(rows).enumerate() {
            let value = self.number(&tensor, name, first + i * step)?;
            if !value.is_finite() {
                return Err(Error::Corrupt(format!(
                    "{}: {name}[{}] is NaN or infinite: the checkpoint is damaged, download it again",
                    self.place(),
                    first + i * step
                )));
            }
            to.copy_from_slice(&value.to_ne_bytes());
        }
        Ok(out)
    }

    fn number(&self, tensor: &TensorView<'_>, name: &str, at: usize) -> Result<f32> {
        let bytes = &tensor.bytes[at * tensor.dtype.bytes()..(at + 1) * tensor.dtype.bytes()];
        Ok(match (tensor.dtype, bytes) {
            (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            _ => {
                return Err(Error::Shape(format!(
                    "{}: {name} is {}, expected f32, bf16 or f16",
                    self.place(),
                    tensor.dtype
                )));
            }
        })
    }

    fn pack(
        &self,
        matrix: Matrix,
        view: &CheckpointView<'_>,
        layout: &TileLayout,
        panel: usize,
        to: &mut [u8],
    ) -> Result<()> {
        pack_panels(view, layout, panel..panel + 1, to, 1).map_err(|error| match error {
            PackError::NotFinite { .. } => Error::Corrupt(format!(
                "{}: {} ({matrix:?}): {error}: the checkpoint is damaged, download it again",
                self.place(),
                matrix.tensor()
            )),
            other => Error::Shape(format!("{}: {}: {other}", self.place(), matrix.tensor())),
        })
    }
}

/// Packs one expert: the workers of each node fill their node's panels, so that pages are first touched there.
pub(super) fn pack_expert(
    spec: &LayerSpec,
    rule: &ShardRule,
    nodes: &[NodeWeights],
    index: usize,
    tensors: &[(&str, TensorView<'_>)],
    pool: &Pool,
) -> Result<()> {
    let expert = Expert::new(spec, index, tensors)?;
    pool.run(&|worker: &Worker<'_>| {
        let node = &nodes[worker.node];
        let slot = node.slot(index as u32);
        if slot.is_empty() {
            return Ok(());
        }
        let slice = &node.slices[slot.slice];
        debug_assert_eq!(rule.slice(index, worker.node).len(), slice.rows);
        let shards = spec.w13_shards();
        let (w13_panels, w2_panels) = (slice.w13.panels(), slice.w2.panels());
        let gate = expert.view(Matrix::Gate, slot, slice.rows)?;
        let up = (shards == 2).then(|| expert.view(Matrix::Up, slot, slice.rows)).transpose()?;
        let down = expert.view(Matrix::Down, slot, slice.rows)?;
        let total = w13_panels * shards + w2_panels;
        let share = |at: usize| at * total / worker.node_workers;
        for task in share(worker.index_in_node)..share(worker.index_in_node + 1) {
            let (matrix, view, layout, panel, at) = if task < w13_panels * shards {
                let (matrix, view) = match &up {
                    Some(up) if task % 2 == 1 => (Matrix::Up, up),
                    _ => (Matrix::Gate, &gate),
                };
                (matrix, view, &slice.w13, task / shards, slot.w13 + task * slice.w13.panel_bytes())
            } else {
                let panel = task - w13_panels * shards;
                (Matrix::Down, &down, &slice.w2, panel, slot.w2 + panel * slice.w2.panel_bytes())
            };
            // SAFETY: every panel belongs to one task, every task to one worker, and the layer is not sealed, so
            // nobody reads it.
            let to = unsafe { node.arena.slice_mut(at, layout.panel_bytes()) };
            expert.pack(matrix, view, layout, panel, to)?;
        }
        if worker.index_in_node == 0 {
            for (matrix, at) in
                [(Matrix::Gate, slot.gate_bias), (Matrix::Up, slot.up_bias), (Matrix::Down, slot.w2_bias)]
            {
                if at != Slot::NONE {
                    let bias = expert.bias(matrix, slot, slice.rows)?;
                    // SAFETY: as above; biases lie apart from the panels.
                    unsafe { node.arena.slice_mut(at, bias.len()) }.copy_from_slice(&bias);
                }
            }
        }
        Ok(())
    })
}

/// Experts whose packed form [`replicate`] copies: the first of each kind of slice on each node.
pub(super) fn templates(nodes: &[NodeWeights]) -> std::collections::BTreeSet<usize> {
    nodes.iter().flat_map(|node| (0..node.slices.len()).map(|slice| node.template(slice))).collect()
}

/// Copies the packed form of the templates to every other expert of the same shape, panels rotated by the expert's index, with
/// the owning workers; for weights that only have to be valid.
pub(super) fn replicate(nodes: &[NodeWeights], num_experts: usize, pool: &Pool) -> Result<()> {
    pool.run(&|worker: &Worker<'_>| {
        let node = &nodes[worker.node];
        let share = |at: usize| at * num_experts / worker.node_workers;
        for expert in share(worker.index_in_node)..share(worker.index_in_node + 1) {
            let slot = node.slot(expert as u32);
            if slot.is_empty() {
                continue;
            }
            let template = node.template(slot.slice);
            let from = node.slot(template as u32);
            if template == expert {
                continue;
            }
            let slice = &node.slices[slot.slice];
            for (from, to, layout, panels) in [
                (from.w13, slot.w13, &slice.w13, node.w13_panels(slot)),
                (from.w2, slot.w2, &slice.w2, slice.w2.panels()),
            ] {
                let bytes = layout.panel_bytes();
                for panel in 0..panels {
                    // SAFETY: the template was packed before this job and is only read; every other expert belongs
                    // to one worker.
                    let (source, target) = unsafe {
                        (
                            node.arena.slice_mut(from + (panel + expert) % panels * bytes, bytes),
                            node.arena.slice_mut(to + panel * bytes, bytes),
                        )
                    };
                    target.copy_from_slice(source);
                }
            }
            for (from, to) in
                [(from.gate_bias, slot.gate_bias), (from.up_bias, slot.up_bias), (from.w2_bias, slot.w2_bias)]
            {
                if from != Slot::NONE && to != Slot::NONE {
                    let bytes = node.bias_bytes(slot, to);
                    // SAFETY: as above.
                    let (source, target) =
                        unsafe { (node.arena.slice_mut(from, bytes), node.arena.slice_mut(to, bytes)) };
                    target.copy_from_slice(source);
                }
            }
        }
        Ok(())
    })
}

/// An owned tensor.
pub(super) struct OwnedTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: AlignedVec<u8>,
}

impl OwnedTensor {
    pub(super) fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, bytes: &self.bytes }
    }
}

/// Pseudo-random tensors of one expert: uniform, scaled by one over the square root of the width that they reduce.
pub(super) fn dummy_expert(spec: &LayerSpec, seed: u64) -> Result<Vec<(&'static str, OwnedTensor)>> {
    let (rows, hidden, inner) =
        (spec.w13_shards() * spec.intermediate_size, spec.hidden_size, spec.intermediate_size);
    let Some(dtype) = spec.tensor_dtype() else {
        return Err(Error::UnsupportedFormat(format!(
            "{}: no dummy weights in format {}",
            spec.name, spec.format
        )));
    };
    let mut tensors = vec![
        ("w13_weight", random_tensor(dtype, &[rows, hidden], hidden, seed)),
        ("w2_weight", random_tensor(dtype, &[hidden, inner], inner, seed ^ 1)),
    ];
    if spec.w13_bias {
        tensors.push(("w13_bias", random_tensor(dtype, &[rows], hidden, seed ^ 2)));
    }
    if spec.w2_bias {
        tensors.push(("w2_bias", random_tensor(dtype, &[hidden], inner, seed ^ 3)));
    }
    Ok(tensors)
}

fn random_tensor(dtype: Dtype, shape: &[usize], width: usize, seed: u64) -> OwnedTensor {
    let len: usize = shape.iter().product();
    let mut bytes = AlignedVec::zeroed(len * dtype.bytes());
    let gain = (3.0 / width as f32).sqrt();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for to in bytes.chunks_exact_mut(dtype.bytes()) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * gain;
        match dtype {
            Dtype::F32 => to.copy_from_slice(&value.to_le_bytes()),
            Dtype::F16 => to.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            _ => to.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        }
    }
    OwnedTensor { dtype, shape: shape.to_vec(), bytes }
}
