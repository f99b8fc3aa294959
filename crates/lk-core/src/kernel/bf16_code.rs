//! Codes as pairs of bf16 by table, without passing through f32: AVX-512 VBMI.
//!
//! A 4-bit code is the index of a 16-bit permute, which reads five bits and ignores the rest; `vpmultishiftqb` brings both
//! codes of a pair to their lanes in one instruction. An 8-bit code looks up two bytes. Scales that are powers of two are added
//! to the exponent where the number is not zero.

use super::TileArgs;
use crate::format::code::E2M1_MAGNITUDES;
use crate::simd::F32Isa;
use crate::simd::avx512::{Avx512Vbmi, E4M3_BYTES};
use crate::tile::NR;
use std::arch::x86_64::*;

/// A code as bf16 pairs.
///
/// # Safety
///
/// The CPU has AVX-512 F, BW, VL, DQ and VBMI; panels are as long as their layout says.
pub(super) trait Bf16Code: 'static {
    /// The code has a zero point per group.
    const ZERO: bool;
    /// What a group needs, for both halves of the channels.
    type Group: Copy;
    type Prepared: Copy;
    /// `None` if the scales of the group cannot be added to exponents.
    unsafe fn group<const FOLDED: bool>(a: &TileArgs<'_>, group: usize) -> Option<Self::Group>;
    unsafe fn prepare(words: __m512i) -> Self::Prepared;
    /// Codes `2 * pair` and `2 * pair + 1` of each word of half `v`.
    unsafe fn pair<const FOLDED: bool>(
        words: Self::Prepared,
        pair: usize,
        group: &Self::Group,
        v: usize,
    ) -> __m512i;
}

const fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Bit offsets that bring nibbles `2p` and `2p + 1` of each word to the low bits of its two halves.
const NIBBLES: [[u8; 64]; 4] = {
    let mut t = [[0u8; 64]; 4];
    let mut p = 0;
    while p < 4 {
        let mut byte = 0;
        while byte < 64 {
            // Odd bytes are above the index and may be anything.
            t[p][byte] = ((byte / 4 % 2) * 32 + 8 * p + (byte / 2 % 2) * 4) as u8;
            byte += 1;
        }
        p += 1;
    }
    t
};

#[inline(always)]
unsafe fn nibbles(words: __m512i, pair: usize) -> __m512i {
    // SAFETY: the trait's promise; the table has four rows of 64 bytes.
    unsafe { _mm512_multishift_epi64_epi8(_mm512_loadu_si512(NIBBLES[pair].as_ptr().cast()), words) }
}

#[inline(always)]
unsafe fn lookup(table: &[u16; 32], index: __m512i) -> __m512i {
    // SAFETY: the trait's promise.
    unsafe { _mm512_permutexvar_epi16(index, _mm512_loadu_si512(table.as_ptr().cast())) }
}

/// Twice the sixteen values, since the fifth index bit belongs to another code.
const U4_TABLE: [u16; 32] = {
    let mut t = [0; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = bf16((i % 16) as f32 - 8.0);
        i += 1;
    }
    t
};

/// Offset-binary nibbles.
pub(super) struct U4Pairs;
impl Bf16Code for U4Pairs {
    const ZERO: bool = false;
    type Group = ();
    type Prepared = __m512i;
    #[inline(always)]
    unsafe fn group<const FOLDED: bool>(_: &TileArgs<'_>, _: usize) -> Option<()> {
        Some(())
    }
    #[inline(always)]
    unsafe fn prepare(words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn pair<const FOLDED: bool>(words: __m512i, pair: usize, (): &(), _: usize) -> __m512i {
        // SAFETY: the trait's promise.
        unsafe { lookup(&U4_TABLE, nibbles(words, pair)) }
    }
}

/// Differences of two nibbles, by the difference plus 16.
const DIFFERENCE_TABLE: [u16; 32] = {
    let mut t = [0; 32];
    let mut i = 0;
    while i < 32 {
        t[i] = bf16(i as f32 - 16.0);
        i += 1;
    }
    t
};

/// Nibbles less a zero point.
pub(super) struct U4ZeroPairs;
impl Bf16Code for U4ZeroPairs {
    const ZERO: bool = true;
    /// 16 less the zero point, in both lanes of each channel.
    type Group = [__m512i; 2];
    type Prepared = __m512i;
    #[inline(always)]
    unsafe fn group<const FOLDED: bool>(a: &TileArgs<'_>, group: usize) -> Option<Self::Group> {
        // SAFETY: the trait's promise: the panel holds 32 zero points for each group.
        unsafe {
            let zeros = a.panel.add(a.layout.zero_offset() + group * NR);
            let half = |v: usize| {
                // The stored number is the zero point less 8.
                let z = _mm512_cvtepi8_epi32(_mm_loadu_si128(zeros.add(v * 16).cast()));
                both_lanes(_mm512_sub_epi32(_mm512_set1_epi32(8), z))
            };
            Some([half(0), half(1)])
        }
    }
    #[inline(always)]
    unsafe fn prepare(words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn pair<const FOLDED: bool>(
        words: __m512i,
        pair: usize,
        group: &Self::Group,
        v: usize,
    ) -> __m512i {
        // SAFETY: the trait's promise.
        unsafe {
            let code = _mm512_and_si512(nibbles(words, pair), _mm512_set1_epi16(15));
            lookup(&DIFFERENCE_TABLE, _mm512_add_epi16(code, group[v]))
        }
    }
}

/// The low half of each 32-bit lane in both halves.
#[inline(always)]
unsafe fn both_lanes(x: __m512i) -> __m512i {
    // SAFETY: the trait's promise.
    unsafe {
        let low = _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(low))
    }
}

/// What powers of two add to exponents, in both lanes of each channel; `None` if a scale is so small that the exponent of a
/// number down to `2^lowest` could pass below zero.
#[inline(always)]
unsafe fn exponents(a: &TileArgs<'_>, group: usize, lowest: i32) -> Option<[__m512i; 2]> {
    // SAFETY: the trait's promise: the panel holds 32 scales (or one) for each group.
    unsafe {
        let layout = a.layout;
        let scales = a.panel.add(layout.scale_offset() + group * layout.scale_channels());
        let load = |v: usize| {
            if layout.scale_channels() == 1 {
                _mm512_set1_epi32(i32::from(*scales))
            } else {
                _mm512_cvtepu8_epi32(_mm_loadu_si128(scales.add(v * 16).cast()))
            }
        };
        let least = _mm512_set1_epi32(1 - lowest);
        let codes = [load(0), load(1)];
        if (_mm512_cmplt_epi32_mask(codes[0], least) | _mm512_cmplt_epi32_mask(codes[1], least)) != 0 {
            return None;
        }
        let bias = _mm512_set1_epi32(127);
        let low = both_lanes(_mm512_slli_epi32::<7>(_mm512_sub_epi32(codes[0], bias)));
        let high = both_lanes(_mm512_slli_epi32::<7>(_mm512_sub_epi32(codes[1], bias)));
        // Not by `map`: library functions are compiled without the features and would not be inlined.
        Some([low, high])
    }
}

#[inline(always)]
unsafe fn add_exponent(x: __m512i, exponent: __m512i) -> __m512i {
    // SAFETY: the trait's promise.
    unsafe {
        let nonzero = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff));
        _mm512_maskz_add_epi16(nonzero, x, exponent)
    }
}

const E2M1_TABLE: [u16; 32] = {
    let mut t = [0; 32];
    let mut i = 0;
    while i < 32 {
        let magnitude = E2M1_MAGNITUDES[i % 8];
        t[i] = bf16(if i % 16 < 8 { magnitude } else { -magnitude });
        i += 1;
    }
    t
};

/// e2m1 with or without a power of two.
pub(super) struct E2m1Pairs;
impl Bf16Code for E2m1Pairs {
    const ZERO: bool = false;
    type Group = [__m512i; 2];
    type Prepared = __m512i;
    #[inline(always)]
    unsafe fn group<const FOLDED: bool>(a: &TileArgs<'_>, group: usize) -> Option<Self::Group> {
        // SAFETY: the trait's promise. The least number is 2^-1.
        unsafe { if FOLDED { exponents(a, group, -1) } else { Some([_mm512_setzero_si512(); 2]) } }
    }
    #[inline(always)]
    unsafe fn prepare(words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn pair<const FOLDED: bool>(
        words: __m512i,
        pair: usize,
        group: &Self::Group,
        v: usize,
    ) -> __m512i {
        // SAFETY: the trait's promise.
        unsafe {
            let x = lookup(&E2M1_TABLE, nibbles(words, pair));
            if FOLDED { add_exponent(x, group[v]) } else { x }
        }
    }
}

/// Byte indices that build, for pair `p` of each word, two bf16 from their lower and upper bytes in two vectors.
const E4M3_PAIRS: [[u8; 64]; 2] = {
    let mut t = [[0u8; 64]; 2];
    let mut p = 0;
    while p < 2 {
        let mut byte = 0;
        while byte < 64 {
            let code = byte / 4 * 4 + 2 * p + byte / 2 % 2;
            t[p][byte] = (code + byte % 2 * 64) as u8;
            byte += 1;
        }
        p += 1;
    }
    t
};

/// e4m3 with or without a power of two.
pub(super) struct E4m3Pairs;
impl Bf16Code for E4m3Pairs {
    const ZERO: bool = false;
    type Group = [__m512i; 2];
    /// Lower and upper byte of each code's bf16.
    type Prepared = (__m512i, __m512i);
    #[inline(always)]
    unsafe fn group<const FOLDED: bool>(a: &TileArgs<'_>, group: usize) -> Option<Self::Group> {
        // SAFETY: the trait's promise. The least number is 2^-9.
        unsafe { if FOLDED { exponents(a, group, -9) } else { Some([_mm512_setzero_si512(); 2]) } }
    }
    #[inline(always)]
    unsafe fn prepare(words: __m512i) -> Self::Prepared {
        // SAFETY: the trait's promise.
        unsafe { Avx512Vbmi::e4m3_prepare(words) }
    }
    #[inline(always)]
    unsafe fn pair<const FOLDED: bool>(
        (low, high): Self::Prepared,
        pair: usize,
        group: &Self::Group,
        v: usize,
    ) -> __m512i {
        // SAFETY: the trait's promise; the table has two rows of 64 bytes.
        unsafe {
            let index = _mm512_loadu_si512(E4M3_PAIRS[pair].as_ptr().cast());
            let x = _mm512_permutex2var_epi8(low, index, high);
            if FOLDED { add_exponent(x, group[v]) } else { x }
        }
    }
}

// The upper half of every e4m3 value's f32 is all of it.
const _: () = assert!(E4M3_BYTES[0][8] == 0x3c && E4M3_BYTES[1][8] == 0x80);
