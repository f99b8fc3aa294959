//! AVX-512 (F, BW, VL, DQ), sixteen f32 lanes, and the same with VBMI.

use super::F32Isa;
use crate::format::code::E2M1_MAGNITUDES;
use std::arch::x86_64::*;

/// AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512;

/// [`Avx512`] with VBMI, whose byte permutes decode e4m3 by table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vbmi;

macro_rules! op {
    (fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        #[inline(always)]
        unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the trait's promise: features present, pointers valid.
            unsafe { $body }
        }
    };
}

const U4_VALUES: [f32; 16] = [-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.];

const E2M1_VALUES: [f32; 16] = {
    let mut t = [0.0; 16];
    let mut i = 0;
    while i < 8 {
        t[i] = E2M1_MAGNITUDES[i];
        t[i + 8] = -E2M1_MAGNITUDES[i];
        i += 1;
    }
    t
};

/// The operations that both tokens share; `$base` is where the code itself lives.
macro_rules! shared_ops {
    () => {
        const LANES: usize = 16;
        type F = __m512;
        type W = __m512i;
        type M = __mmask16;

        op!(
            fn zero() -> __m512 {
                _mm512_setzero_ps()
            }
        );
        op!(
            fn splat(x: f32) -> __m512 {
                _mm512_set1_ps(x)
            }
        );
        op!(
            fn load(p: *const f32) -> __m512 {
                _mm512_loadu_ps(p)
            }
        );
        op!(
            fn store(p: *mut f32, x: __m512) -> () {
                _mm512_storeu_ps(p, x);
            }
        );
        op!(
            fn add(a: __m512, b: __m512) -> __m512 {
                _mm512_add_ps(a, b)
            }
        );
        op!(
            fn sub(a: __m512, b: __m512) -> __m512 {
                _mm512_sub_ps(a, b)
            }
        );
        op!(
            fn mul(a: __m512, b: __m512) -> __m512 {
                _mm512_mul_ps(a, b)
            }
        );
        op!(
            fn div(a: __m512, b: __m512) -> __m512 {
                _mm512_div_ps(a, b)
            }
        );
        op!(
            fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
                _mm512_fmadd_ps(a, b, c)
            }
        );
        op!(
            fn min(a: __m512, b: __m512) -> __m512 {
                _mm512_min_ps(a, b)
            }
        );
        op!(
            fn max(a: __m512, b: __m512) -> __m512 {
                _mm512_max_ps(a, b)
            }
        );
        op!(
            fn lt(a: __m512, b: __m512) -> __mmask16 {
                _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)
            }
        );
        op!(
            fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 {
                _mm512_mask_blend_ps(m, b, a)
            }
        );
        op!(
            fn round_i32(a: __m512) -> __m512i {
                _mm512_cvtps_epi32(a)
            }
        );
        op!(
            fn from_i32(w: __m512i) -> __m512 {
                _mm512_cvtepi32_ps(w)
            }
        );

        op!(
            fn prefetch(p: *const u8) -> () {
                _mm_prefetch::<_MM_HINT_T0>(p.cast());
            }
        );
        op!(
            fn load_words(p: *const u8) -> __m512i {
                _mm512_loadu_si512(p.cast())
            }
        );
        op!(
            fn splat_word(x: u32) -> __m512i {
                _mm512_set1_epi32(x as i32)
            }
        );
        op!(
            fn add_words(a: __m512i, b: __m512i) -> __m512i {
                _mm512_add_epi32(a, b)
            }
        );
        op!(
            fn and_words(a: __m512i, b: __m512i) -> __m512i {
                _mm512_and_si512(a, b)
            }
        );
        op!(
            fn or_words(a: __m512i, b: __m512i) -> __m512i {
                _mm512_or_si512(a, b)
            }
        );
        op!(
            fn shl(w: __m512i, n: u32) -> __m512i {
                _mm512_sllv_epi32(w, _mm512_set1_epi32(n as i32))
            }
        );
        op!(
            fn shr(w: __m512i, n: u32) -> __m512i {
                _mm512_srlv_epi32(w, _mm512_set1_epi32(n as i32))
            }
        );
        op!(
            fn as_f32(w: __m512i) -> __m512 {
                _mm512_castsi512_ps(w)
            }
        );
        op!(
            fn as_words(f: __m512) -> __m512i {
                _mm512_castps_si512(f)
            }
        );

        op!(
            fn f16_low(w: __m512i) -> __m512 {
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w))
            }
        );
        op!(
            fn i8(w: __m512i, j: u32) -> __m512 {
                let top = _mm512_sllv_epi32(w, _mm512_set1_epi32(24 - 8 * j as i32));
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
            }
        );
        // The permutes read four index bits and ignore the rest of the word.
        op!(
            fn u4(w: __m512i, j: u32) -> __m512 {
                _mm512_permutexvar_ps(Self::shr(w, 4 * j), _mm512_loadu_ps(U4_VALUES.as_ptr()))
            }
        );
        op!(
            fn e2m1(w: __m512i, j: u32) -> __m512 {
                _mm512_permutexvar_ps(Self::shr(w, 4 * j), _mm512_loadu_ps(E2M1_VALUES.as_ptr()))
            }
        );

        op!(
            fn load_bf16(p: *const u16) -> __m512 {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        );
        op!(
            fn store_bf16(p: *mut u16, x: __m512) -> () {
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let rounded = _mm512_mask_blend_epi32(nan, even, quiet);
                _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
            }
        );
        op!(
            fn load_f16(p: *const u16) -> __m512 {
                _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
            }
        );
        op!(
            fn store_f16(p: *mut u16, x: __m512) -> () {
                _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
            }
        );
        op!(
            fn load_e4m3(p: *const u8) -> __m512 {
                // As f16 bits that are 2^8 too small.
                let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
                let half =
                    _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xbf80_u16 as i16));
                _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
            }
        );
        op!(
            fn load_e8m0(p: *const u8) -> __m512 {
                let exponent = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())));
                _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x0040_0000)))
            }
        );
        op!(
            fn load_i8(p: *const i8) -> __m512 {
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
            }
        );
    };
}

impl F32Isa for Avx512 {
    shared_ops!();

    type E4 = (__m512i, __m512i);
    op!(
        fn e4m3_prepare(w: __m512i) -> (__m512i, __m512i) {
            // Bytes 0 and 2, then 1 and 3, as f16 bits that are 2^8 too small.
            let keep = _mm512_set1_epi16(0xbf80_u16 as i16);
            let even = _mm512_and_si512(_mm512_srai_epi16::<1>(_mm512_slli_epi16::<8>(w)), keep);
            let odd = _mm512_and_si512(_mm512_srai_epi16::<1>(w), keep);
            (even, odd)
        }
    );
    op!(
        fn e4m3(w: (__m512i, __m512i), j: u32) -> __m512 {
            let pair = if j & 1 == 0 { w.0 } else { w.1 };
            let half = if j < 2 { pair } else { _mm512_srli_epi32::<16>(pair) };
            _mm512_mul_ps(Self::f16_low(half), _mm512_set1_ps(256.0))
        }
    );
}

/// Bytes 3 and 2 of the f32 of each non-negative e4m3 code; the lower two bytes are zero for all codes.
pub(crate) const E4M3_BYTES: [[u8; 128]; 2] = {
    let mut t = [[0u8; 128]; 2];
    let mut c = 0;
    while c < 128 {
        let exponent = (c >> 3) as u32;
        let mantissa = (c & 7) as u32;
        let bits = if c == 127 {
            0x7fc0_0000
        } else if exponent > 0 {
            ((exponent + 120) << 23) | (mantissa << 20)
        } else if mantissa == 0 {
            0
        } else {
            // m * 2^-9 with the leading one of m taken out.
            let lead = mantissa.ilog2();
            ((118 + lead) << 23) | ((mantissa << (23 - lead)) & 0x007f_ffff)
        };
        t[0][c] = (bits >> 24) as u8;
        t[1][c] = (bits >> 16) as u8;
        c += 1;
    }
    t
};

/// Byte indices that build, for byte `j` of each word, the f32 with upper bytes taken from two vectors.
const E4M3_SPREAD: [[u8; 64]; 4] = {
    let mut t = [[0u8; 64]; 4];
    let mut j = 0;
    while j < 4 {
        let mut lane = 0;
        while lane < 16 {
            t[j][4 * lane + 2] = (4 * lane + j) as u8;
            t[j][4 * lane + 3] = (64 + 4 * lane + j) as u8;
            lane += 1;
        }
        j += 1;
    }
    t
};

impl F32Isa for Avx512Vbmi {
    shared_ops!();

    /// (byte 2, byte 3) of each code's f32, the sign included.
    type E4 = (__m512i, __m512i);
    op!(
        fn e4m3_prepare(w: __m512i) -> (__m512i, __m512i) {
            let table = |b: usize| {
                let p = E4M3_BYTES[b].as_ptr();
                (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(64).cast()))
            };
            let ((h0, h1), (l0, l1)) = (table(0), table(1));
            let high = _mm512_permutex2var_epi8(h0, w, h1);
            let low = _mm512_permutex2var_epi8(l0, w, l1);
            // high | (w & 0x80)
            let signed = _mm512_ternarylogic_epi32::<0b1111_1000>(high, w, _mm512_set1_epi8(-128));
            (low, signed)
        }
    );
    op!(
        fn e4m3(w: (__m512i, __m512i), j: u32) -> __m512 {
            let spread = _mm512_loadu_si512(E4M3_SPREAD[j as usize].as_ptr().cast());
            let upper = 0xcccc_cccc_cccc_cccc;
            _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(upper, w.0, spread, w.1))
        }
    );
}
