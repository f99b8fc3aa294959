//! The rows that a kernel multiplies by.

use std::marker::PhantomData;

/// Element type of a kernel's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// f32.
    F32,
    /// bf16, as `u16` bits.
    Bf16,
}

impl Operand {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// `m` rows of `width` elements: rows of a matrix at a constant stride, all of them or those picked by an index.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    base: *const u8,
    stride_bytes: usize,
    index: Option<&'a [u32]>,
    m: usize,
    width: usize,
    operand: Operand,
    data: PhantomData<&'a [u8]>,
}

impl<'a> Rows<'a> {
    /// All rows of a matrix `[len / stride, stride]`; the last row may end after `width` elements.
    ///
    /// # Panics
    ///
    /// If `width` is zero or more than `stride`.
    pub fn f32(data: &'a [f32], width: usize, stride: usize) -> Self {
        Self::view(data.as_ptr().cast(), data.len(), Operand::F32, width, stride)
    }

    /// The same of bf16 bits.
    ///
    /// # Panics
    ///
    /// As [`Rows::f32`].
    pub fn bf16(data: &'a [u16], width: usize, stride: usize) -> Self {
        Self::view(data.as_ptr().cast(), data.len(), Operand::Bf16, width, stride)
    }

    fn view(base: *const u8, len: usize, operand: Operand, width: usize, stride: usize) -> Self {
        assert!(width > 0 && width <= stride, "rows of {width} elements at a stride of {stride}");
        let m = if len < width { 0 } else { (len - width) / stride + 1 };
        // SAFETY: the slice covers m rows: the last one ends at (m - 1) * stride + width <= len.
        unsafe { Self::from_raw(base, operand, m, width, stride * operand.bytes()) }
    }

    /// `m` rows at `base + i * stride_bytes`.
    ///
    /// # Safety
    ///
    /// For the lifetime `'a` every row is valid for reading `width` elements of `operand` and nobody writes to it.
    pub unsafe fn from_raw(
        base: *const u8,
        operand: Operand,
        m: usize,
        width: usize,
        stride_bytes: usize,
    ) -> Self {
        Self { base, stride_bytes, index: None, m, width, operand, data: PhantomData }
    }

    /// Row `index[i]` as row `i`.
    ///
    /// # Panics
    ///
    /// If these rows were picked already or an index is out of range.
    #[must_use]
    pub fn pick(self, index: &'a [u32]) -> Self {
        assert!(self.index.is_none(), "rows are picked once");
        assert!(index.iter().all(|&i| (i as usize) < self.m), "row index beyond {} rows", self.m);
        Self { index: Some(index), m: index.len(), ..self }
    }

    /// Rows `first .. first + count` of these.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    #[must_use]
    pub fn range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.m, "rows {first}+{count} of {}", self.m);
        match self.index {
            Some(index) => Self { index: Some(&index[first..first + count]), m: count, ..self },
            None => Self { base: self.base.wrapping_add(first * self.stride_bytes), m: count, ..self },
        }
    }

    /// Number of rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Elements of a row that may be read.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Element type.
    pub fn operand(&self) -> Operand {
        self.operand
    }

    /// Bytes from row to row, if constant.
    pub(super) fn stride_bytes(&self) -> Option<usize> {
        if self.index.is_none() { Some(self.stride_bytes) } else { None }
    }

    /// First byte of row `i`; the caller keeps `i < m`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> *const u8 {
        let at = self.index.map_or(i, |index| index[i] as usize);
        self.base.wrapping_add(at * self.stride_bytes)
    }
}
