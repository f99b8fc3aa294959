//! Where the parts of a weight matrix lie in the tensors of a checkpoint.

use crate::format::{GlobalScale, WeightFormat};
use crate::{Dtype, Error, Result};

/// A two-dimensional view of fixed-size elements in bytes: element `(row, col)` lies at
/// `offset + row * row_stride + col * col_stride`, counted in elements.
///
/// Interleaved rows are a doubled row stride, a transposed matrix has `row_stride` 1.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    /// The tensor's bytes, little-endian.
    pub bytes: &'a [u8],
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Index of element (0, 0).
    pub offset: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one column to the next.
    pub col_stride: usize,
}

impl<'a> Grid<'a> {
    /// A contiguous row-major tensor of `columns` columns.
    pub fn rows(bytes: &'a [u8], element_bytes: usize, columns: usize) -> Self {
        Self { bytes, element_bytes, offset: 0, row_stride: columns, col_stride: 1 }
    }

    /// The view without its first `rows` rows and `cols` columns.
    #[must_use]
    pub fn skip(self, rows: usize, cols: usize) -> Self {
        Self { offset: self.offset + rows * self.row_stride + cols * self.col_stride, ..self }
    }

    /// Every `step`-th row, beginning with `first` (interleaved gate and up rows: step 2, first 0 or 1).
    #[must_use]
    pub fn every(self, first: usize, step: usize) -> Self {
        Self { offset: self.offset + first * self.row_stride, row_stride: self.row_stride * step, ..self }
    }

    /// Rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Bytes of element `(row, col)`.
    pub fn get(&self, row: usize, col: usize) -> &'a [u8] {
        let at = (self.offset + row * self.row_stride + col * self.col_stride) * self.element_bytes;
        &self.bytes[at..at + self.element_bytes]
    }

    /// The 32-bit word `(row, col)` of a grid of words.
    pub(super) fn word(&self, row: usize, col: usize) -> u32 {
        let b = self.get(row, col);
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// `count` elements of row `row` from column `col` on; `col_stride` must be 1.
    pub(super) fn run(&self, row: usize, col: usize, count: usize) -> &'a [u8] {
        debug_assert_eq!(self.col_stride, 1);
        let at = (self.offset + row * self.row_stride + col) * self.element_bytes;
        &self.bytes[at..at + count * self.element_bytes]
    }

    /// Refuses a view whose last element lies beyond the bytes.
    pub(super) fn check(&self, rows: usize, cols: usize, what: &str) -> Result<()> {
        let last = (rows.max(1) - 1)
            .checked_mul(self.row_stride)
            .and_then(|r| (cols.max(1) - 1).checked_mul(self.col_stride)?.checked_add(r))
            .and_then(|i| i.checked_add(self.offset)?.checked_add(1)?.checked_mul(self.element_bytes));
        match last {
            Some(end) if end <= self.bytes.len() => Ok(()),
            _ => Err(Error::Shape(format!(
                "{what}: {} bytes do not hold [{rows}, {cols}] elements of {} bytes at strides ({}, {})",
                self.bytes.len(),
                self.element_bytes,
                self.row_stride,
                self.col_stride
            ))),
        }
    }
}

/// How the codes of a matrix `[n, k]` are laid out in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeOrder {
    /// Codes of a row are a little-endian bit stream along `k`: plain tensors, packed nibbles with the low one first, and
    /// little-endian words of them. The grid's element is the code, or a byte or word of several codes.
    Rows,
    /// The same with bytes in offset binary (compressed-tensors int8): the top bit of each code is flipped.
    RowsOffsetBinary,
    /// Whole codes at any stride (transposed checkpoints); not for 4-bit codes.
    Elements,
    /// GPTQ: words `[k / per_word, n]`, each holding consecutive `k` of one channel. 8-bit codes are offset binary.
    WordsAlongK,
    /// AWQ: words `[k, n / 8]`, each holding eight channels in the order of [`AWQ_NIBBLE`].
    AwqWords,
}

/// Nibble of an AWQ word that holds channel `c` of its eight.
pub(super) const AWQ_NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Scales `[n / rows, k / group]` of the whole matrix and where the view begins in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) grid: Grid<'a>,
    /// First channel of the view, counted from the channel that the grid's first row begins with.
    pub(super) n_start: usize,
    /// First `k` of the view.
    pub(super) k_start: usize,
    /// Groups in the grid.
    pub(super) groups: usize,
}

/// Zero points, packed into words like the codes of their checkpoint kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum Zeros<'a> {
    /// Words `[n / per_word, groups]` (compressed-tensors); the first channel of the view.
    AlongRows(Grid<'a>, usize),
    /// Words `[groups, n / per_word]` (GPTQ); the first channel of the view, and what is added to each word: v1 files store
    /// the zero point less one.
    AlongColumns(Grid<'a>, usize, u32),
    /// Words `[groups, n / 8]` in AWQ order; the first channel of the view.
    Awq(Grid<'a>, usize),
}

impl Zeros<'_> {
    /// Zero point of a channel and group, an unsigned code of `bits` bits.
    pub(super) fn get(&self, bits: usize, n: usize, group: usize) -> u32 {
        let per_word = 32 / bits;
        let code = |word: u32, place: usize| (word >> (place * bits)) & ((1 << bits) - 1);
        match self {
            Self::AlongRows(grid, first) => {
                let n = first + n;
                code(grid.word(n / per_word, group), n % per_word)
            }
            Self::AlongColumns(grid, first, add) => {
                let n = first + n;
                code(grid.word(group, n / per_word).wrapping_add(*add), n % per_word)
            }
            Self::Awq(grid, first) => {
                let n = first + n;
                code(grid.word(group, n / 8), AWQ_NIBBLE[n % 8] as usize)
            }
        }
    }
}

/// One logical matrix `[n, k]` of a checkpoint: codes and whatever its format needs to decode them. Borrowed, unpacked.
#[derive(Debug, Clone)]
pub struct CheckpointView<'a> {
    pub(super) format: WeightFormat,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) order: CodeOrder,
    pub(super) codes: Grid<'a>,
    pub(super) scales: Option<Scales<'a>>,
    pub(super) zeros: Option<Zeros<'a>>,
    pub(super) global: Option<f32>,
    /// Group of each `k` of the view, `i32` little-endian.
    pub(super) index: Option<&'a [u8]>,
}

impl<'a> CheckpointView<'a> {
    /// An unscaled matrix of f32, bf16 or f16 elements; `grid` may be strided or transposed.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedFormat`] for another dtype, [`Error::Shape`] if the bytes are too few or the elements have
    /// another size.
    pub fn plain(dtype: Dtype, grid: Grid<'a>, n: usize, k: usize) -> Result<Self> {
        let format = WeightFormat::from_dtype(dtype)?;
        if grid.element_bytes != dtype.bytes() {
            return Err(Error::Shape(format!(
                "elements of {} bytes for {dtype} weights",
                grid.element_bytes
            )));
        }
        let order = if grid.col_stride == 1 { CodeOrder::Rows } else { CodeOrder::Elements };
        Self::codes(format, order, grid, n, k)
    }

    /// Codes alone; scales and the rest are added by the functions below.
    pub(super) fn codes(
        format: WeightFormat,
        order: CodeOrder,
        grid: Grid<'a>,
        n: usize,
        k: usize,
    ) -> Result<Self> {
        let per_word = format.code.per_word();
        let (rows, cols) = match order {
            CodeOrder::Rows | CodeOrder::RowsOffsetBinary => {
                (n, (k * format.code.bits()).div_ceil(grid.element_bytes * 8))
            }
            CodeOrder::Elements => (n, k),
            CodeOrder::WordsAlongK => (k.div_ceil(per_word), n),
            CodeOrder::AwqWords => (k, n.div_ceil(8)),
        };
        grid.check(rows, cols, "weight")?;
        Ok(Self { format, n, k, order, codes: grid, scales: None, zeros: None, global: None, index: None })
    }

    /// Adds the scales `[⌈(n_start + n) / rows⌉, groups]` of the matrix that this view begins at `(n_start, k_start)` of.
    pub(super) fn with_scales(mut self, grid: Grid<'a>, n_start: usize, k_start: usize) -> Result<Self> {
        let Some(scale) = self.format.scale else {
            return Err(Error::Shape(format!("{} weights have no group scales", self.format)));
        };
        let mismatch =
            || Error::Shape(format!("a scale of {} bytes for {}", grid.element_bytes, self.format));
        if grid.element_bytes != scale.kind.bytes() {
            return Err(mismatch());
        }
        let groups = match scale.group as usize {
            0 => 1,
            group => (k_start + self.k).div_ceil(group),
        };
        grid.check((n_start + self.n).div_ceil(scale.rows as usize), groups, "scale")?;
        self.scales = Some(Scales { grid, n_start, k_start, groups });
        Ok(self)
    }

    pub(super) fn with_zeros(mut self, zeros: Zeros<'a>) -> Result<Self> {
        let per_word = self.format.code.per_word();
        let groups = self.scales.map_or(0, |s| s.groups);
        match &zeros {
            Zeros::AlongRows(grid, first) => {
                grid.check((first + self.n).div_ceil(per_word), groups, "zero point")?;
            }
            Zeros::AlongColumns(grid, first, _) | Zeros::Awq(grid, first) => {
                grid.check(groups, (first + self.n).div_ceil(per_word), "zero point")?;
            }
        }
        self.zeros = Some(zeros);
        Ok(self)
    }

    /// Adds the scale of the whole matrix.
    pub(super) fn with_global(mut self, value: f32) -> Result<Self> {
        let divides = self.format.global == GlobalScale::Divide;
        if !value.is_finite() || divides && value == 0.0 {
            return Err(Error::Corrupt(format!("the scale of the matrix is {value}")));
        }
        self.global = Some(value);
        Ok(self)
    }

    /// Adds the group of each `k` (act-order); all groups of the matrix are kept.
    pub(super) fn with_index(mut self, index: &'a [u8], groups: usize) -> Result<Self> {
        if index.len() != self.k * 4 {
            return Err(Error::Shape(format!("g_idx of {} bytes for k = {}", index.len(), self.k)));
        }
        for (k, group) in index.as_chunks::<4>().0.iter().enumerate() {
            let group = i32::from_le_bytes(*group);
            if usize::try_from(group).map_or(true, |g| g >= groups) {
                return Err(Error::Corrupt(format!("g_idx[{k}] is {group}, but there are {groups} groups")));
            }
        }
        if let Some(scales) = &mut self.scales {
            scales.grid.check(self.n, groups, "scale")?;
            scales.groups = groups;
        }
        self.index = Some(index);
        Ok(self)
    }

    /// Refuses a view that lacks a part of its format.
    pub(super) fn complete(self) -> Result<Self> {
        let format = self.format;
        let missing = if format.scale.is_some() && self.scales.is_none() {
            "group scales"
        } else if format.zero_point && self.zeros.is_none() {
            "zero points"
        } else if format.global != GlobalScale::None && self.global.is_none() {
            "the scale of the matrix"
        } else if format.act_order && self.index.is_none() {
            "g_idx"
        } else {
            return Ok(self);
        };
        Err(Error::Missing(format!("{format} weights need {missing}")))
    }

    /// Format of the matrix.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Layout that fits this view.
    ///
    /// # Errors
    ///
    /// As [`super::TileLayout::sliced`].
    pub fn layout(&self) -> Result<super::TileLayout> {
        match (self.index, &self.scales) {
            (Some(_), Some(s)) => super::TileLayout::act_order(self.format, self.n, self.k, s.groups),
            (_, Some(s)) => super::TileLayout::sliced(self.format, self.n, self.k, s.n_start, s.k_start),
            _ => super::TileLayout::new(self.format, self.n, self.k),
        }
    }
}
