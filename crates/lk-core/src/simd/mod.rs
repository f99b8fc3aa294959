//! Instruction sets: what this CPU has, and the vector operations that kernels are written in.
//!
//! An ISA is a zero-size type that implements [`F32Isa`]. Its operations are `#[inline(always)] unsafe fn` without
//! `target_feature`; a kernel is one outer function with the features enabled that inlines them. The promise of every
//! operation is the same: **the CPU has the features of the ISA**, which holds because kernels are only reachable through
//! [`Cpu`], and pointers are valid for the lanes they name.
#![expect(unsafe_code, reason = "vector intrinsics; the one obligation of each operation is on its trait")]
#![allow(clippy::wildcard_imports, reason = "intrinsics are one vocabulary")]
#![allow(clippy::cast_ptr_alignment, reason = "vector loads and unaligned reads take any address")]

pub mod amx;
pub mod cpu;
pub(crate) mod scalar;
mod transpose;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

pub use cpu::{Cpu, IsaLevel};
pub use transpose::{BLOCK_WORDS, transpose_words};

/// Vector operations on f32 lanes and on the 32-bit words of panels.
///
/// # Safety
///
/// All functions: the CPU has the ISA's features; pointers are valid for `LANES` elements of the type named, at any
/// alignment.
pub(crate) trait F32Isa: Copy + Send + Sync + 'static {
    /// f32 lanes of a vector.
    const LANES: usize;
    /// `LANES` f32.
    type F: Copy;
    /// `LANES` 32-bit words.
    type W: Copy;
    /// One truth value per lane.
    type M: Copy;
    /// A vector of words of four e4m3 codes, prepared for [`F32Isa::e4m3`].
    type E4: Copy;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The smaller one; `b` if either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// The larger one; `b` if either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a < b`, false for NaN.
    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M;
    /// `a` where true, else `b`.
    unsafe fn select(m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer, ties to even; unspecified outside of the i32 range.
    unsafe fn round_i32(a: Self::F) -> Self::W;
    unsafe fn from_i32(w: Self::W) -> Self::F;

    /// Asks for the cache line of any address.
    unsafe fn prefetch(p: *const u8);

    /// `LANES` words at any alignment.
    unsafe fn load_words(p: *const u8) -> Self::W;
    unsafe fn splat_word(x: u32) -> Self::W;
    unsafe fn add_words(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn and_words(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn or_words(a: Self::W, b: Self::W) -> Self::W;
    /// Logical shifts by `n` < 32 bits.
    unsafe fn shl(w: Self::W, n: u32) -> Self::W;
    unsafe fn shr(w: Self::W, n: u32) -> Self::W;
    unsafe fn as_f32(w: Self::W) -> Self::F;
    unsafe fn as_words(f: Self::F) -> Self::W;

    /// The f16 in the low half of each word.
    unsafe fn f16_low(w: Self::W) -> Self::F;
    /// Signed byte `j` of each word as a number.
    unsafe fn i8(w: Self::W, j: u32) -> Self::F;
    /// Nibble `j` of each word minus 8.
    unsafe fn u4(w: Self::W, j: u32) -> Self::F;
    /// Nibble `j` of each word as e2m1.
    unsafe fn e2m1(w: Self::W, j: u32) -> Self::F;
    unsafe fn e4m3_prepare(w: Self::W) -> Self::E4;
    /// Byte `j` of each prepared word as e4m3.
    unsafe fn e4m3(w: Self::E4, j: u32) -> Self::F;

    /// `LANES` bf16 as f32.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Rounds to nearest even; NaN stays NaN.
    unsafe fn store_bf16(p: *mut u16, x: Self::F);
    /// `LANES` f16 as f32.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Rounds to nearest even.
    unsafe fn store_f16(p: *mut u16, x: Self::F);
    /// `LANES` e4m3 bytes as f32.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// `LANES` e8m0 bytes as f32.
    unsafe fn load_e8m0(p: *const u8) -> Self::F;
    /// `LANES` signed bytes as f32.
    unsafe fn load_i8(p: *const i8) -> Self::F;
}
