//! Zeroed scratch buffers on cache-line boundaries.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line, a zmm register, a row of an AMX tile.
pub const SCRATCH_ALIGN_BYTES: usize = 64;

pub(crate) mod sealed {
    /// Types for which all-zero bytes are a value and that need no drop.
    pub trait Scalar: Copy + Send + Sync + 'static {}
    macro_rules! scalar { ($($t:ty),*) => { $(impl Scalar for $t {})* } }
    scalar!(u8, i8, u16, i16, u32, i32, u64, i64, usize, f32, f64, half::bf16, half::f16);
}

/// A slice of fixed length whose start is 64-byte aligned and whose elements begin as zero.
///
/// Large buffers take no memory before they are touched, and then from the node of the thread that touches them:
/// a worker makes and clears its own scratch.
pub struct AlignedVec<T: sealed::Scalar> {
    /// What the allocator gave, up to 63 bytes before the first element.
    raw: NonNull<u8>,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: an AlignedVec owns its allocation as a Vec does, and T is Send.
unsafe impl<T: sealed::Scalar> Send for AlignedVec<T> {}
// SAFETY: &AlignedVec gives only &[T], and T is Sync.
unsafe impl<T: sealed::Scalar> Sync for AlignedVec<T> {}

impl<T: sealed::Scalar> AlignedVec<T> {
    /// `len` zeros.
    ///
    /// # Panics
    /// If `len` elements exceed the address space; the allocator's own failure aborts, as for `Vec`.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the size isn't zero, see layout().
        let Some(raw) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        let shift = raw.addr().get().next_multiple_of(SCRATCH_ALIGN_BYTES) - raw.addr().get();
        // SAFETY: shift is below SCRATCH_ALIGN_BYTES, and the allocation is that much longer than the elements.
        let start = unsafe { raw.add(shift) }.cast::<T>();
        Self { raw, start, len }
    }

    /// Room for the elements behind an aligned start, at the allocator's own alignment: for a stricter one the
    /// system allocator clears by hand and so touches all pages, here it takes fresh pages from the kernel.
    fn layout(len: usize) -> Layout {
        const { assert!(align_of::<T>() <= 16) };
        (len.checked_mul(size_of::<T>()))
            .and_then(|bytes| bytes.checked_add(SCRATCH_ALIGN_BYTES))
            .and_then(|bytes| Layout::from_size_align(bytes, 16).ok())
            .expect("scratch of more bytes than the address space has")
    }
}

impl<T: sealed::Scalar> Deref for AlignedVec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were allocated, zero is a value of every Scalar, and &self forbids writers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: sealed::Scalar> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref; &mut self is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: sealed::Scalar> Drop for AlignedVec<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by zeroed() with this very layout.
        unsafe { dealloc(self.raw.as_ptr(), Self::layout(self.len)) }
    }
}

impl<T: sealed::Scalar> Clone for AlignedVec<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: sealed::Scalar> Default for AlignedVec<T> {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl<T: sealed::Scalar> fmt::Debug for AlignedVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedVec<{}>({} elements)", std::any::type_name::<T>(), self.len)
    }
}
