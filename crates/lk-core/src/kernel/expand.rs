//! Codes to bf16, a stretch of `k` at a time, in the layout of a bf16 panel: what bf16 kernels multiply where the checkpoint
//! has fewer bits.
//!
//! Every code but f32 and f16 is exact in bf16. Whether its scale may be folded in is a matter of significant bits: a power of
//! two always, e4m3 (4 bits) times e2m1 (2 bits) too. Other scales are applied to sums.

use super::TileArgs;
use super::bf16_code::{Bf16Code, E2m1Pairs, E4m3Pairs, U4Pairs, U4ZeroPairs};
use super::f32_fma::{E2m1, E4m3, F32Code, I8, SCALED, U4, ZERO, load_scales};
use crate::format::{CodeKind, ScaleKind, WeightFormat};
use crate::simd::F32Isa;
use crate::simd::avx512::Avx512Vbmi;
use crate::tile::{K_TILE, NR, STEP_BYTES, TileLayout};
use std::ops::Range;

/// Where the scales of a format go when its codes are expanded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scaling {
    /// Into the bf16 weights, exactly.
    Weights,
    /// Onto the finished sums: one scale per channel, or none.
    Channels,
    /// Onto the sums of each group.
    Groups,
}

impl Scaling {
    pub(super) fn of(format: WeightFormat) -> Self {
        match format.scale {
            None => Self::Channels,
            Some(s) if s.group == 0 => Self::Channels,
            Some(s) if s.kind == ScaleKind::E8m0 => Self::Weights,
            Some(s) if s.kind == ScaleKind::E4m3 && format.code == CodeKind::E2m1 => Self::Weights,
            Some(_) => Self::Groups,
        }
    }
}

/// Writes the bf16 steps of the blocks of `K_TILE` that hold `k0 .. k1` to `dst`; `k` of these blocks outside of the range
/// become zero, so that groups may begin and end inside of a block.
///
/// # Safety
///
/// As [`super::RunFn`], for AVX-512 with VBMI; `dst` holds the blocks.
pub(super) type ExpandFn = unsafe fn(a: &TileArgs<'_>, k0: usize, k1: usize, dst: *mut u8);

/// The function for a format whose scales go to `scaling`, if its codes need expanding.
pub(super) fn function(format: WeightFormat, scaling: Scaling) -> Option<ExpandFn> {
    let folded = scaling == Scaling::Weights;
    let power_of_two = format.scale.is_some_and(|s| s.kind == ScaleKind::E8m0);
    Some(match (format.code, format.zero_point) {
        (CodeKind::E4m3, _) if folded => expand_pairs::<E4m3Pairs, E4m3, true>,
        (CodeKind::E4m3, _) => expand_pairs::<E4m3Pairs, E4m3, false>,
        (CodeKind::I8, _) if !folded => expand::<I8, ZERO>,
        (CodeKind::U4, false) if !folded => expand_pairs::<U4Pairs, U4, false>,
        (CodeKind::U4, true) if !folded => expand_pairs::<U4ZeroPairs, U4, false>,
        (CodeKind::E2m1, _) if folded && power_of_two => expand_pairs::<E2m1Pairs, E2m1, true>,
        (CodeKind::E2m1, _) if folded => expand::<E2m1, SCALED>,
        (CodeKind::E2m1, _) => expand_pairs::<E2m1Pairs, E2m1, false>,
        _ => return None,
    })
}

/// Zeroes what the blocks of `K_TILE` hold outside of `k0 .. k1` and returns the first `k` of `dst`.
///
/// # Safety
///
/// As [`ExpandFn`].
#[inline(always)]
unsafe fn clear_edges(k0: usize, k1: usize, dst: *mut u8) -> usize {
    let base = k0 / K_TILE * K_TILE;
    if k0 == base && k1.is_multiple_of(K_TILE) {
        return base;
    }
    let place = |k: usize| (k - base) / 2 * STEP_BYTES;
    let end = k1.next_multiple_of(K_TILE);
    // SAFETY: the caller's promise: dst holds the blocks.
    unsafe {
        dst.write_bytes(0, place(k0));
        dst.add(place(k1)).write_bytes(0, place(end) - place(k1));
    }
    base
}

/// See [`ExpandFn`]: codes become bf16 pairs without passing through f32. Groups whose scales that way does not hold go the
/// other way, by `S`.
///
/// # Safety
///
/// As [`ExpandFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn expand_pairs<C: Bf16Code, S: F32Code, const FOLDED: bool>(
    a: &TileArgs<'_>,
    k0: usize,
    k1: usize,
    dst: *mut u8,
) {
    let layout = a.layout;
    // SAFETY: the caller's promise covers the steps of k0 .. k1 in the panel and their blocks in dst.
    unsafe {
        let base = clear_edges(k0, k1, dst);
        let grouped = (FOLDED || C::ZERO) && layout.groups() > 0;
        let mut k = k0;
        while k < k1 {
            let group = if grouped { layout.group_of(k) } else { 0 };
            let until = if grouped { group_end(layout, group).min(k1) } else { k1 };
            let Some(state) = C::group::<FOLDED>(a, group) else {
                stretch::<S, SCALED>(a, group, k..until, base, dst);
                k = until;
                continue;
            };
            while k < until {
                let step = a.panel.add(k / S::KU * STEP_BYTES);
                let to = dst.add((k - base) / 2 * STEP_BYTES);
                for v in 0..2 {
                    Avx512Vbmi::prefetch(step.wrapping_add(PREFETCH_BYTES + v * 64));
                    let words = C::prepare(Avx512Vbmi::load_words(step.add(v * 64)));
                    unroll!(pair < S::KU / 2, {
                        let both = Avx512Vbmi::as_f32(C::pair::<FOLDED>(words, pair, &state, v));
                        Avx512Vbmi::store(to.add(pair * STEP_BYTES + v * 64).cast(), both);
                    });
                }
                k += S::KU;
            }
        }
    }
}

/// Bytes ahead of the current step that are asked for.
const PREFETCH_BYTES: usize = 4096;

/// See [`ExpandFn`]: codes become f32, are scaled, and lose the lower half that is zero.
///
/// # Safety
///
/// As [`ExpandFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn expand<C: F32Code, const FLAGS: u8>(a: &TileArgs<'_>, k0: usize, k1: usize, dst: *mut u8) {
    let layout = a.layout;
    // SAFETY: the caller's promise.
    unsafe {
        let base = clear_edges(k0, k1, dst);
        let grouped = FLAGS != 0 && layout.groups() > 0;
        let mut k = k0;
        while k < k1 {
            let group = if grouped { layout.group_of(k) } else { 0 };
            let until = if grouped { group_end(layout, group).min(k1) } else { k1 };
            stretch::<C, FLAGS>(a, group, k..until, base, dst);
            k = until;
        }
    }
}

/// A stretch of one group, by way of f32.
///
/// # Safety
///
/// As [`ExpandFn`], for the `k` of the stretch.
#[inline(always)]
unsafe fn stretch<C: F32Code, const FLAGS: u8>(
    a: &TileArgs<'_>,
    group: usize,
    range: Range<usize>,
    base: usize,
    dst: *mut u8,
) {
    type I = Avx512Vbmi;
    const NV: usize = 2;
    let layout = a.layout;
    // SAFETY: the caller's promise.
    unsafe {
        let mut scale = [I::splat(1.0); NV];
        let mut zero = [I::zero(); NV];
        if FLAGS & SCALED != 0 {
            let kind = layout.format().scale.map_or(ScaleKind::F32, |s| s.kind);
            let scales = a.panel.add(layout.scale_offset());
            scale = load_scales::<I, NV>(kind, layout.scale_channels() == 1, scales, group, 0);
        }
        if FLAGS & ZERO != 0 && layout.format().zero_point {
            for v in 0..NV {
                zero[v] = I::load_i8(a.panel.add(layout.zero_offset() + group * NR + v * I::LANES).cast());
            }
        }
        for k in range.step_by(C::KU) {
            let step = a.panel.add(k / C::KU * STEP_BYTES);
            let to = dst.add((k - base) / 2 * STEP_BYTES);
            for v in 0..NV {
                I::prefetch(step.wrapping_add(PREFETCH_BYTES + v * 64));
                let words = C::prepare::<I>(I::load_words(step.add(v * 64)));
                unroll!(pair < C::KU / 2, {
                    let mut w =
                        [C::decode::<I>(words, 2 * pair as u32), C::decode::<I>(words, 2 * pair as u32 + 1)];
                    for half in &mut w {
                        if FLAGS & ZERO != 0 {
                            *half = I::sub(*half, zero[v]);
                        }
                        if FLAGS & SCALED != 0 {
                            *half = I::mul(*half, scale[v]);
                        }
                    }
                    let low = I::shr(I::as_words(w[0]), 16);
                    let high = I::and_words(I::as_words(w[1]), I::splat_word(0xffff_0000));
                    let both = I::as_f32(I::or_words(low, high));
                    I::store(to.add(pair * STEP_BYTES + v * 64).cast(), both);
                });
            }
        }
    }
}

/// First `k` behind a group, not beyond the padded `k`.
pub(super) fn group_end(layout: &TileLayout, group: usize) -> usize {
    ((group + 1) * layout.group() - layout.k_phase()).min(layout.k_padded())
}
