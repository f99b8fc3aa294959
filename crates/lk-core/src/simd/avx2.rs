//! AVX2 with FMA and F16C: eight f32 lanes.

use super::F32Isa;
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2;

macro_rules! op {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        #[inline(always)]
        unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the trait's promise: features present, pointers valid.
            unsafe { $body }
        }
    };
}

impl F32Isa for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type W = __m256i;
    type M = __m256;
    type E4 = (__m256i, __m256i);

    op!(
        fn zero() -> __m256 {
            _mm256_setzero_ps()
        }
    );
    op!(
        fn splat(x: f32) -> __m256 {
            _mm256_set1_ps(x)
        }
    );
    op!(
        fn load(p: *const f32) -> __m256 {
            _mm256_loadu_ps(p)
        }
    );
    op!(
        fn store(p: *mut f32, x: __m256) -> () {
            _mm256_storeu_ps(p, x);
        }
    );
    op!(
        fn add(a: __m256, b: __m256) -> __m256 {
            _mm256_add_ps(a, b)
        }
    );
    op!(
        fn sub(a: __m256, b: __m256) -> __m256 {
            _mm256_sub_ps(a, b)
        }
    );
    op!(
        fn mul(a: __m256, b: __m256) -> __m256 {
            _mm256_mul_ps(a, b)
        }
    );
    op!(
        fn div(a: __m256, b: __m256) -> __m256 {
            _mm256_div_ps(a, b)
        }
    );
    op!(
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            _mm256_fmadd_ps(a, b, c)
        }
    );
    op!(
        fn min(a: __m256, b: __m256) -> __m256 {
            _mm256_min_ps(a, b)
        }
    );
    op!(
        fn max(a: __m256, b: __m256) -> __m256 {
            _mm256_max_ps(a, b)
        }
    );
    op!(
        fn lt(a: __m256, b: __m256) -> __m256 {
            _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)
        }
    );
    op!(
        fn select(m: __m256, a: __m256, b: __m256) -> __m256 {
            _mm256_blendv_ps(b, a, m)
        }
    );
    op!(
        fn round_i32(a: __m256) -> __m256i {
            _mm256_cvtps_epi32(a)
        }
    );
    op!(
        fn from_i32(w: __m256i) -> __m256 {
            _mm256_cvtepi32_ps(w)
        }
    );

    op!(
        fn prefetch(p: *const u8) -> () {
            _mm_prefetch::<_MM_HINT_T0>(p.cast());
        }
    );
    op!(
        fn load_words(p: *const u8) -> __m256i {
            _mm256_loadu_si256(p.cast())
        }
    );
    op!(
        fn splat_word(x: u32) -> __m256i {
            _mm256_set1_epi32(x as i32)
        }
    );
    op!(
        fn add_words(a: __m256i, b: __m256i) -> __m256i {
            _mm256_add_epi32(a, b)
        }
    );
    op!(
        fn and_words(a: __m256i, b: __m256i) -> __m256i {
            _mm256_and_si256(a, b)
        }
    );
    op!(
        fn or_words(a: __m256i, b: __m256i) -> __m256i {
            _mm256_or_si256(a, b)
        }
    );
    op!(
        fn shl(w: __m256i, n: u32) -> __m256i {
            _mm256_sllv_epi32(w, _mm256_set1_epi32(n as i32))
        }
    );
    op!(
        fn shr(w: __m256i, n: u32) -> __m256i {
            _mm256_srlv_epi32(w, _mm256_set1_epi32(n as i32))
        }
    );
    op!(
        fn as_f32(w: __m256i) -> __m256 {
            _mm256_castsi256_ps(w)
        }
    );
    op!(
        fn as_words(f: __m256) -> __m256i {
            _mm256_castps_si256(f)
        }
    );

    op!(
        fn f16_low(w: __m256i) -> __m256 {
            // Both 128-bit halves gather their low words into their lower 64 bits; those are joined.
            let order = _mm256_setr_epi8(
                0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1,
                -1, -1, -1, -1, -1, -1,
            );
            let halves = _mm256_permute4x64_epi64::<0b1000>(_mm256_shuffle_epi8(w, order));
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves))
        }
    );
    op!(
        fn i8(w: __m256i, j: u32) -> __m256 {
            let top = _mm256_sllv_epi32(w, _mm256_set1_epi32(24 - 8 * j as i32));
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
        }
    );
    op!(
        fn u4(w: __m256i, j: u32) -> __m256 {
            // With the top bit flipped a nibble is two's complement.
            let flipped = _mm256_xor_si256(w, _mm256_set1_epi32(0x8888_8888_u32 as i32));
            let top = _mm256_sllv_epi32(flipped, _mm256_set1_epi32(28 - 4 * j as i32));
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top))
        }
    );
    op!(
        fn e2m1(w: __m256i, j: u32) -> __m256 {
            // The permute reads three index bits and ignores the rest; the sign is bit 3 of the nibble.
            let table = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
            let magnitude = _mm256_permutevar8x32_ps(table, Self::shr(w, 4 * j));
            let sign = _mm256_and_ps(_mm256_castsi256_ps(Self::shl(w, 28 - 4 * j)), _mm256_set1_ps(-0.0));
            _mm256_or_ps(magnitude, sign)
        }
    );
    op!(
        fn e4m3_prepare(w: __m256i) -> (__m256i, __m256i) {
            // Bytes 0 and 2, then 1 and 3, as f16 bits that are 2^8 too small.
            let keep = _mm256_set1_epi16(0xbf80_u16 as i16);
            let even = _mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(w)), keep);
            let odd = _mm256_and_si256(_mm256_srai_epi16::<1>(w), keep);
            (even, odd)
        }
    );
    op!(
        fn e4m3(w: (__m256i, __m256i), j: u32) -> __m256 {
            let pair = if j & 1 == 0 { w.0 } else { w.1 };
            let half = if j < 2 { pair } else { _mm256_srli_epi32::<16>(pair) };
            _mm256_mul_ps(Self::f16_low(half), _mm256_set1_ps(256.0))
        }
    );

    op!(
        fn load_bf16(p: *const u16) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    );
    op!(
        fn store_bf16(p: *mut u16, x: __m256) -> () {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(even, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        }
    );
    op!(
        fn load_f16(p: *const u16) -> __m256 {
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
        }
    );
    op!(
        fn store_f16(p: *mut u16, x: __m256) -> () {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        }
    );
    op!(
        fn load_e4m3(p: *const u8) -> __m256 {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            Self::e4m3(Self::e4m3_prepare(bytes), 0)
        }
    );
    op!(
        fn load_e8m0(p: *const u8) -> __m256 {
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())));
            _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x0040_0000)))
        }
    );
    op!(
        fn load_i8(p: *const i8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
        }
    );
}
