//! The reference ISA: arrays of eight and plain arithmetic. Every operation is safe code but for the raw loads.

use super::F32Isa;
use crate::format::code;
use half::{bf16, f16};
use std::array::from_fn;

/// Portable code; runs on every CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

const LANES: usize = 8;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn mapw(a: [u32; LANES], b: [u32; LANES], f: impl Fn(u32, u32) -> u32) -> [u32; LANES] {
    from_fn(|i| f(a[i], b[i]))
}

/// Reads `LANES` values of any plain type.
///
/// # Safety
///
/// `p` is valid for reading `LANES` values of `T`.
#[inline(always)]
unsafe fn read<T: Copy>(p: *const T) -> [T; LANES] {
    // SAFETY: the caller's promise; unaligned reads of plain values.
    unsafe { p.cast::<[T; LANES]>().read_unaligned() }
}

impl F32Isa for Scalar {
    const LANES: usize = LANES;
    type F = [f32; LANES];
    type W = [u32; LANES];
    type M = [bool; LANES];
    type E4 = [u32; LANES];

    unsafe fn zero() -> Self::F {
        [0.0; LANES]
    }
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }
    }
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the trait's promise on pointers.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(x) }
    }
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }
    /// Two roundings: without hardware support a fused multiply-add is a slow library call, and the error bound of the
    /// family covers both.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M {
        from_fn(|i| a[i] < b[i])
    }
    unsafe fn select(m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if m[i] { a[i] } else { b[i] })
    }
    unsafe fn round_i32(a: Self::F) -> Self::W {
        a.map(|x| x.round_ties_even() as i32 as u32)
    }
    unsafe fn from_i32(w: Self::W) -> Self::F {
        w.map(|x| x as i32 as f32)
    }

    unsafe fn prefetch(_: *const u8) {}

    unsafe fn load_words(p: *const u8) -> Self::W {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p.cast::<u32>()) }.map(u32::from_le)
    }
    unsafe fn splat_word(x: u32) -> Self::W {
        [x; LANES]
    }
    unsafe fn add_words(a: Self::W, b: Self::W) -> Self::W {
        mapw(a, b, u32::wrapping_add)
    }
    unsafe fn and_words(a: Self::W, b: Self::W) -> Self::W {
        mapw(a, b, |a, b| a & b)
    }
    unsafe fn or_words(a: Self::W, b: Self::W) -> Self::W {
        mapw(a, b, |a, b| a | b)
    }
    unsafe fn shl(w: Self::W, n: u32) -> Self::W {
        w.map(|x| x << n)
    }
    unsafe fn shr(w: Self::W, n: u32) -> Self::W {
        w.map(|x| x >> n)
    }
    unsafe fn as_f32(w: Self::W) -> Self::F {
        w.map(f32::from_bits)
    }
    unsafe fn as_words(f: Self::F) -> Self::W {
        f.map(f32::to_bits)
    }

    unsafe fn f16_low(w: Self::W) -> Self::F {
        w.map(|x| f16::from_bits(x as u16).to_f32())
    }
    unsafe fn i8(w: Self::W, j: u32) -> Self::F {
        w.map(|x| f32::from((x >> (8 * j)) as u8 as i8))
    }
    unsafe fn u4(w: Self::W, j: u32) -> Self::F {
        w.map(|x| ((x >> (4 * j)) & 15) as f32 - 8.0)
    }
    unsafe fn e2m1(w: Self::W, j: u32) -> Self::F {
        w.map(|x| code::e2m1_to_f32((x >> (4 * j)) as u8))
    }
    unsafe fn e4m3_prepare(w: Self::W) -> Self::E4 {
        w
    }
    unsafe fn e4m3(w: Self::E4, j: u32) -> Self::F {
        w.map(|x| e4m3((x >> (8 * j)) as u8))
    }

    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }.map(|x| bf16::from_bits(x).to_f32())
    }
    unsafe fn store_bf16(p: *mut u16, x: Self::F) {
        // SAFETY: the trait's promise on pointers.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(|x| bf16::from_f32(x).to_bits())) }
    }
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }.map(|x| f16::from_bits(x).to_f32())
    }
    unsafe fn store_f16(p: *mut u16, x: Self::F) {
        // SAFETY: the trait's promise on pointers.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(|x| f16::from_f32(x).to_bits())) }
    }
    unsafe fn load_e4m3(p: *const u8) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }.map(e4m3)
    }
    unsafe fn load_e8m0(p: *const u8) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }.map(code::e8m0_to_f32)
    }
    unsafe fn load_i8(p: *const i8) -> Self::F {
        // SAFETY: the trait's promise on pointers.
        unsafe { read(p) }.map(f32::from)
    }
}

/// e4m3 placed at the exponent of an f32, which is 2^120 too small; exact, and cheaper than the definition.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let sign = u32::from(code & 0x80) << 24;
    let magnitude = u32::from(code & 0x7f);
    if magnitude == 0x7f {
        return f32::NAN;
    }
    let value = f32::from_bits(magnitude << 20) * f32::from_bits(0x7b80_0000);
    f32::from_bits(value.to_bits() | sign)
}
