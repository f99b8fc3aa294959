//! The matrices of one expert, found among the tensors that vLLM's layer (or a checkpoint) names.
//!
//! Names are those of the parameters without the expert dimension, `w13_…` for gate and up, `w2_…` for down:
//!
//! | part | names, first one found | shape per expert (w13; s = 2 with a gate) |
//! |---|---|---|
//! | codes | `weight`, `weight_packed`, `qweight` | `[sI, H]` and packed forms; GPTQ `[H/pf, sI]`, AWQ `[H, sI/8]` |
//! | scales | `weight_scale_inv`, `weight_scale`, `scales` | block `[s⌈I/b⌉, ⌈H/b⌉]`, row `[sI, G]`; GPTQ, AWQ `[G, sI]` |
//! | zero points | `weight_zero_point`, `qzeros` | `[sI/pf, G]`; GPTQ, AWQ `[G, sI/pf]` |
//! | scale of the matrix | `weight_scale_2`, `weight_global_scale`, `weight_scale` | `[s]` |
//! | group of each k | `weight_g_idx`, `g_idx` | `[H]` |

use super::source::{CheckpointView, CodeOrder, Grid, Zeros};
use crate::format::{CodeKind, GlobalScale, ScaleKind, WeightFormat};
use crate::{Dtype, Error, Result};

/// A contiguous tensor, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// One matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertMatrix {
    /// First half of w13 (or all of it without a gate).
    Gate,
    /// Second half of w13.
    Up,
    /// w2.
    Down,
}

/// Which part of which matrix is wanted.
#[derive(Debug, Clone, Copy)]
pub struct ExpertSlice {
    /// The matrix.
    pub matrix: ExpertMatrix,
    /// Width that the expert sees.
    pub hidden_size: usize,
    /// Width between w13 and w2, all of it.
    pub intermediate_size: usize,
    /// w13 holds gate and up.
    pub gated: bool,
    /// Rows of w13 alternate between gate and up.
    pub interleaved: bool,
    /// First of the `len` channels (`Gate`, `Up`) or columns (`Down`) of `intermediate_size`.
    pub start: usize,
    /// Their number.
    pub len: usize,
    /// Zero points of GPTQ files are stored less one (`checkpoint_format` `gptq`, not `gptq_v2`).
    pub gptq_v1: bool,
}

impl ExpertSlice {
    fn prefix(&self) -> &'static str {
        if self.matrix == ExpertMatrix::Down { "w2" } else { "w13" }
    }

    /// `(n, k)` of the whole tensor.
    fn whole(&self) -> (usize, usize) {
        let shards = if self.gated { 2 } else { 1 };
        match self.matrix {
            ExpertMatrix::Down => (self.hidden_size, self.intermediate_size),
            _ => (shards * self.intermediate_size, self.hidden_size),
        }
    }

    /// `(n, k)` of the slice.
    fn shape(&self) -> (usize, usize) {
        match self.matrix {
            ExpertMatrix::Down => (self.hidden_size, self.len),
            _ => (self.len, self.hidden_size),
        }
    }

    /// First channel of the slice among the tensor's, for tensors that are not interleaved.
    fn first_channel(&self) -> usize {
        match self.matrix {
            ExpertMatrix::Down => 0,
            ExpertMatrix::Gate => self.start,
            ExpertMatrix::Up => self.intermediate_size + self.start,
        }
    }

    fn first_k(&self) -> usize {
        if self.matrix == ExpertMatrix::Down { self.start } else { 0 }
    }

    /// Rows of the slice in a grid with one row for each channel of the tensor.
    fn channel_rows<'a>(&self, grid: Grid<'a>) -> Grid<'a> {
        match (self.matrix, self.interleaved) {
            (ExpertMatrix::Down, _) | (_, false) => grid.skip(self.first_channel(), 0),
            (ExpertMatrix::Gate, true) => grid.every(0, 2).skip(self.start, 0),
            (ExpertMatrix::Up, true) => grid.every(1, 2).skip(self.start, 0),
        }
    }
}

/// The tensors of an expert, by name.
struct Tensors<'s, 'a> {
    slice: &'s ExpertSlice,
    format: WeightFormat,
    all: &'s [(&'s str, Tensor<'a>)],
}

impl<'a> Tensors<'_, 'a> {
    fn find(&self, names: &[&str]) -> Result<(String, Tensor<'a>)> {
        let prefix = self.slice.prefix();
        for name in names {
            let full = format!("{prefix}_{name}");
            if let Some((_, tensor)) = self.all.iter().find(|(n, _)| *n == full) {
                let elements: usize = tensor.shape.iter().product();
                if elements * tensor.dtype.bytes() != tensor.bytes.len() {
                    return Err(Error::Shape(format!(
                        "{full}: {} bytes for {} {:?}",
                        tensor.bytes.len(),
                        tensor.dtype,
                        tensor.shape
                    )));
                }
                return Ok((full, *tensor));
            }
        }
        Err(Error::Missing(format!(
            "{prefix}_{} ({} weights)",
            names.join(&format!(" or {prefix}_")),
            self.format
        )))
    }

    fn shape_error(&self, name: &str, tensor: &Tensor<'_>, expected: &str) -> Error {
        Error::Shape(format!(
            "{name} is {} {:?}, expected {expected} (format {}, hidden_size {}, intermediate_size {})",
            tensor.dtype, tensor.shape, self.format, self.slice.hidden_size, self.slice.intermediate_size
        ))
    }

    /// Codes, with their order found from dtype and shape.
    fn codes(&self) -> Result<CheckpointView<'a>> {
        let (name, t) = self.find(&["weight", "weight_packed", "qweight"])?;
        let (slice, code) = (self.slice, self.format.code);
        let ((n, k), (whole_n, whole_k)) = (slice.shape(), slice.whole());
        let element = t.dtype.bytes();
        let per_element = element * 8 / code.bits();
        let &[rows, cols] = t.shape else {
            return Err(self.shape_error(&name, &t, "two dimensions"));
        };
        let first_k = slice.first_k();
        let words = t.dtype == Dtype::I32 && per_element > 1;
        if words && name.ends_with("qweight") {
            let grid = Grid::rows(t.bytes, 4, cols);
            if (rows, cols) == (whole_k.div_ceil(per_element), whole_n) && first_k % per_element == 0 {
                let grid = grid.skip(first_k / per_element, slice.first_channel());
                return CheckpointView::codes(self.format, CodeOrder::WordsAlongK, grid, n, k);
            }
            if code == CodeKind::U4
                && (rows, cols) == (whole_k, whole_n / 8)
                && slice.first_channel() % 8 == 0
            {
                let grid = grid.skip(first_k, slice.first_channel() / 8);
                return CheckpointView::codes(self.format, CodeOrder::AwqWords, grid, n, k);
            }
            return Err(self.shape_error(
                &name,
                &t,
                "words along k [k / per word, n] (GPTQ) or along n [k, n / 8] (AWQ)",
            ));
        }
        let dtype_fits = match code {
            CodeKind::F32 => t.dtype == Dtype::F32,
            CodeKind::Bf16 => t.dtype == Dtype::Bf16,
            CodeKind::F16 => t.dtype == Dtype::F16,
            CodeKind::E4m3 => matches!(t.dtype, Dtype::E4m3 | Dtype::U8),
            CodeKind::I8 => matches!(t.dtype, Dtype::I8 | Dtype::U8 | Dtype::I32),
            CodeKind::U4 | CodeKind::E2m1 => matches!(t.dtype, Dtype::U8 | Dtype::I8 | Dtype::I32),
        };
        if !dtype_fits || (rows, cols) != (whole_n, whole_k.div_ceil(per_element.max(1))) {
            return Err(self.shape_error(&name, &t, &format!("codes of [{whole_n}, {whole_k}]")));
        }
        if first_k % per_element != 0 {
            return Err(Error::Shape(format!(
                "{name}: a slice cannot begin at k {first_k}, inside of an element"
            )));
        }
        let order = if code == CodeKind::I8 && t.dtype != Dtype::I8 {
            CodeOrder::RowsOffsetBinary
        } else {
            CodeOrder::Rows
        };
        let grid = slice.channel_rows(Grid::rows(t.bytes, element, cols)).skip(0, first_k / per_element);
        CheckpointView::codes(self.format, order, grid, n, k)
    }

    fn scales(&self, view: CheckpointView<'a>) -> Result<CheckpointView<'a>> {
        let Some(scale) = self.format.scale else { return Ok(view) };
        let (name, t) = self.find(&["weight_scale_inv", "weight_scale", "scales", "scale"])?;
        let slice = self.slice;
        if ScaleKind::from_dtype(t.dtype) != Some(scale.kind) {
            return Err(self.shape_error(&name, &t, &format!("{} scales", scale.kind.name())));
        }
        let (whole_n, whole_k) = slice.whole();
        let groups = if scale.group == 0 { 1 } else { whole_k.div_ceil(scale.group as usize) };
        // Unit dimensions of 4-D block scales carry nothing; a vector is one column.
        let dims: Vec<usize> = t.shape.iter().copied().filter(|&d| d != 1).collect();
        let product = t.shape.iter().product::<usize>();
        let bytes = scale.kind.bytes();
        if matches!(view.order, CodeOrder::WordsAlongK | CodeOrder::AwqWords) {
            if product != groups * whole_n || t.shape.last() != Some(&whole_n) {
                return Err(self.shape_error(&name, &t, &format!("[{groups}, {whole_n}]")));
            }
            let grid = Grid::rows(t.bytes, bytes, whole_n).skip(0, slice.first_channel()).transposed();
            return view.with_scales(grid, 0, slice.first_k());
        }
        if scale.rows == 1 {
            if product != groups * whole_n || dims.first().is_some_and(|&d| d != whole_n && whole_n != 1) {
                return Err(self.shape_error(&name, &t, &format!("[{whole_n}, {groups}]")));
            }
            let grid = slice.channel_rows(Grid::rows(t.bytes, bytes, groups));
            return view.with_scales(grid, 0, slice.first_k());
        }
        // Gate and up have block grids of their own: up's begins on a new row.
        let block_rows = |n: usize| n.div_ceil(scale.rows as usize);
        let (rows, first) = if slice.matrix == ExpertMatrix::Down {
            (block_rows(slice.hidden_size), 0)
        } else {
            let half = block_rows(slice.intermediate_size);
            (
                if slice.gated { 2 * half } else { half },
                if slice.matrix == ExpertMatrix::Up { half } else { 0 },
            )
        };
        if product != rows * groups || slice.interleaved {
            return Err(self.shape_error(
                &name,
                &t,
                &format!("[{rows}, {groups}] with gate and up in halves"),
            ));
        }
        let n_start = if slice.matrix == ExpertMatrix::Down { 0 } else { slice.start };
        view.with_scales(Grid::rows(t.bytes, bytes, groups).skip(first, 0), n_start, slice.first_k())
    }

    fn zeros(&self, view: CheckpointView<'a>) -> Result<CheckpointView<'a>> {
        if !self.format.zero_point {
            return Ok(view);
        }
        let (name, t) = self.find(&["weight_zero_point", "qzeros"])?;
        let ((whole_n, whole_k), slice) = (self.slice.whole(), self.slice);
        let group = self.format.scale.map_or(0, |s| s.group as usize);
        let groups = if group == 0 { 1 } else { whole_k.div_ceil(group) };
        let packed = whole_n.div_ceil(self.format.code.per_word());
        let first = slice.first_channel();
        let order = view.order;
        let expected = match order {
            CodeOrder::WordsAlongK | CodeOrder::AwqWords => [groups, packed],
            _ => [packed, groups],
        };
        if t.dtype != Dtype::I32 || t.shape != expected || slice.interleaved {
            return Err(self.shape_error(&name, &t, &format!("i32 {expected:?}")));
        }
        // Groups are counted from the view's first group.
        let skip = if group == 0 || self.format.act_order { 0 } else { slice.first_k() / group };
        let grid = Grid::rows(t.bytes, 4, expected[1]);
        view.with_zeros(match order {
            CodeOrder::WordsAlongK => {
                let one = if self.format.code == CodeKind::U4 { 0x1111_1111 } else { 0x0101_0101 };
                Zeros::AlongColumns(grid.skip(skip, 0), first, if slice.gptq_v1 { one } else { 0 })
            }
            CodeOrder::AwqWords => Zeros::Awq(grid.skip(skip, 0), first),
            _ => Zeros::AlongRows(grid.skip(0, skip), first),
        })
    }

    fn global(&self, view: CheckpointView<'a>) -> Result<CheckpointView<'a>> {
        let names: &[&str] = match self.format.global {
            GlobalScale::None => return Ok(view),
            GlobalScale::Multiply => &["weight_scale_2", "weight_scale"],
            GlobalScale::Divide => &["weight_global_scale"],
        };
        let (name, t) = self.find(names)?;
        let values = t.bytes.as_chunks::<4>().0;
        let wanted = usize::from(self.slice.matrix == ExpertMatrix::Up);
        match (t.dtype, values.len()) {
            (Dtype::F32, 1) => view.with_global(f32::from_le_bytes(values[0])),
            (Dtype::F32, 2) => view.with_global(f32::from_le_bytes(values[wanted])),
            _ => Err(self.shape_error(&name, &t, "one f32 for each of gate and up")),
        }
        .map_err(|e| match e {
            Error::Corrupt(text) => Error::Corrupt(format!("{name}: {text}")),
            other => other,
        })
    }

    fn index(&self, view: CheckpointView<'a>) -> Result<CheckpointView<'a>> {
        if !self.format.act_order {
            return Ok(view);
        }
        let (name, t) = self.find(&["weight_g_idx", "g_idx"])?;
        let (_, whole_k) = self.slice.whole();
        if t.dtype != Dtype::I32 || t.shape != [whole_k] {
            return Err(self.shape_error(&name, &t, &format!("i32 [{whole_k}]")));
        }
        let group = self.format.scale.map_or(0, |s| s.group as usize);
        let groups = if group == 0 { 1 } else { whole_k.div_ceil(group) };
        let first = self.slice.first_k() * 4;
        let k = view.k;
        view.with_index(&t.bytes[first..first + k * 4], groups)
    }
}

impl<'a> CheckpointView<'a> {
    /// A part of one matrix of an expert, from the expert's named tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] for a part that `format` needs and `tensors` lack, [`Error::Shape`] for another dtype or shape than
    /// the table of the module says, [`Error::Corrupt`] for scales of the matrix or group indices that cannot be.
    pub fn expert(format: WeightFormat, tensors: &[(&str, Tensor<'a>)], slice: &ExpertSlice) -> Result<Self> {
        format.validate()?;
        if slice.start + slice.len > slice.intermediate_size {
            return Err(Error::Shape(format!(
                "slice {}+{} of intermediate_size {}",
                slice.start, slice.len, slice.intermediate_size
            )));
        }
        let tensors = Tensors { slice, format, all: tensors };
        let view = tensors.codes()?;
        let view = tensors.scales(view)?;
        let view = tensors.zeros(view)?;
        let view = tensors.global(view)?;
        tensors.index(view)?.complete()
    }
}
