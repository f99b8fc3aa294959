//! Where the parts of a weight matrix lie in the tensors of a checkpoint.

use crate::format::WeightFormat;
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

    /// `count` elements of row `row` from column `col` on; `col_stride` must be 1.
    pub(super) fn run(&self, row: usize, col: usize, count: usize) -> &'a [u8] {
        debug_assert_eq!(self.col_stride, 1);
        let at = (self.offset + row * self.row_stride + col) * self.element_bytes;
        &self.bytes[at..at + count * self.element_bytes]
    }

    fn check(&self, rows: usize, cols: usize, what: &str) -> Result<()> {
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
    /// little-endian words of them. The grid's element is the code, or a byte of two codes.
    Rows,
    /// The same with bytes in offset binary (compressed-tensors int8): the top bit of each code is flipped.
    RowsOffsetBinary,
    /// Whole codes at any stride (transposed checkpoints); not for 4-bit codes.
    Elements,
    /// GPTQ: words `[k / per_word, n]`, each holding consecutive `k` of one channel. 8-bit codes are offset binary.
    WordsAlongK,
    /// AWQ: words `[k, n / 8]`, each holding eight channels in the order 0, 2, 4, 6, 1, 3, 5, 7.
    AwqWords,
}

/// One logical matrix `[n, k]` of a checkpoint: codes and whatever its format needs to decode them. Borrowed, unpacked.
#[derive(Debug, Clone)]
pub struct CheckpointView<'a> {
    pub(super) format: WeightFormat,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) order: CodeOrder,
    pub(super) codes: Grid<'a>,
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
        grid.check(n, k, "weight")?;
        let order = if grid.col_stride == 1 { CodeOrder::Rows } else { CodeOrder::Elements };
        Ok(Self { format, n, k, order, codes: grid })
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
}
