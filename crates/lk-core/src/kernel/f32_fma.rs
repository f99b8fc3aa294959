//! Family `f32fma`: codes become f32 in registers, rows are f32, sums are f32. Exact for every format.
//!
//! One generic body. Channels run along the lanes, so that neither `n` nor the sum over `k` needs a shuffle: a step of
//! the panel is loaded, code `j` of each word becomes a vector of 32 weights, and each row contributes
//! `acc += broadcast(x[k]) * weights`. With one or two rows the additions of one accumulator would wait for each other, so
//! that `k` is dealt over `CH` accumulators; scales are applied once per group to the group's sum. With more rows the
//! scale goes into the weights, which are then shared by all rows.

use super::{Block, Family, Kernel, Operand, RunFn, TileArgs, run_blocks};
use crate::format::code::decode_scale;
use crate::format::{CodeKind, GlobalScale, ScaleKind, WeightFormat};
use crate::simd::scalar::Scalar;
use crate::simd::{Cpu, F32Isa, IsaLevel};
use crate::tile::{NR, STEP_BYTES};

/// A code as f32 vectors.
///
/// # Safety
///
/// The CPU has the ISA's features.
pub(super) trait F32Code: 'static {
    /// Codes in a word.
    const KU: usize;
    /// Steps per pass of the inner loop; at least four `k`.
    const STEPS: usize;
    type Prepared<I: F32Isa>: Copy;
    unsafe fn prepare<I: F32Isa>(w: I::W) -> Self::Prepared<I>;
    unsafe fn decode<I: F32Isa>(w: Self::Prepared<I>, j: u32) -> I::F;
}

macro_rules! f32_code {
    ($name:ident, $ku:literal, $steps:literal, |$w:ident, $j:ident| $decode:expr) => {
        pub(super) struct $name;
        impl F32Code for $name {
            const KU: usize = $ku;
            const STEPS: usize = $steps;
            type Prepared<I: F32Isa> = I::W;
            #[inline(always)]
            unsafe fn prepare<I: F32Isa>(w: I::W) -> I::W {
                w
            }
            #[inline(always)]
            unsafe fn decode<I: F32Isa>($w: I::W, $j: u32) -> I::F {
                // SAFETY: the trait's promise.
                unsafe { $decode }
            }
        }
    };
}

f32_code!(F32, 1, 4, |w, _j| I::as_f32(w));
f32_code!(Bf16, 2, 2, |w, j| {
    // The high half is an f32 once the low half is cleared, the low half once shifted up.
    let bits = if j == 0 { I::shl(w, 16) } else { I::and_words(w, I::splat_word(0xffff_0000)) };
    I::as_f32(bits)
});
f32_code!(F16, 2, 2, |w, j| I::f16_low(if j == 0 { w } else { I::shr(w, 16) }));
f32_code!(I8, 4, 1, |w, j| I::i8(w, j));
f32_code!(U4, 8, 1, |w, j| I::u4(w, j));
f32_code!(E2m1, 8, 1, |w, j| I::e2m1(w, j));

pub(super) struct E4m3;
impl F32Code for E4m3 {
    const KU: usize = 4;
    const STEPS: usize = 1;
    type Prepared<I: F32Isa> = I::E4;
    #[inline(always)]
    unsafe fn prepare<I: F32Isa>(w: I::W) -> I::E4 {
        // SAFETY: the trait's promise.
        unsafe { I::e4m3_prepare(w) }
    }
    #[inline(always)]
    unsafe fn decode<I: F32Isa>(w: I::E4, j: u32) -> I::F {
        // SAFETY: the trait's promise.
        unsafe { I::e4m3(w, j) }
    }
}

/// The format has a scale per group.
pub(super) const SCALED: u8 = 1;
/// The format has a zero point per group.
pub(super) const ZERO: u8 = 2;

/// Rows up to which scales are applied to the sum of a group instead of to the weights.
const FOLD_ROWS: usize = 2;

/// Bytes ahead of the current step that are asked for: weights come from memory once and in order.
const PREFETCH_BYTES: usize = 4096;

/// Weights of one `k` with zero point and scale applied as `FLAGS` says.
struct Adjust<I: F32Isa, const NV: usize> {
    scale: [I::F; NV],
    zero: [I::F; NV],
}

/// Adds the products of `k0 .. k1` (a multiple of 16 apart) to `acc`. `codes` is the first step of the panel at the
/// channels of interest.
///
/// # Safety
///
/// As [`super::RunFn`]; `x` are rows of at least `k1` f32.
#[inline(always)]
unsafe fn accumulate<
    I: F32Isa,
    C: F32Code,
    const MR: usize,
    const NV: usize,
    const CH: usize,
    const FLAGS: u8,
>(
    acc: &mut [[[I::F; NV]; MR]; CH],
    codes: *const u8,
    x: &[*const f32; MR],
    k0: usize,
    k1: usize,
    adjust: &Adjust<I, NV>,
) {
    // SAFETY: the caller's promise covers every step and every x of k0 .. k1.
    unsafe {
        let mut step = codes.add(k0 / C::KU * STEP_BYTES);
        let mut k = k0;
        while k < k1 {
            for s in 0..C::STEPS {
                for line in 0..(NV * I::LANES).div_ceil(16) {
                    I::prefetch(step.wrapping_add(PREFETCH_BYTES + s * STEP_BYTES + line * 64));
                }
            }
            unroll!(s < C::STEPS, {
                let mut words = [C::prepare::<I>(I::load_words(step.add(s * STEP_BYTES))); NV];
                for v in 1..NV {
                    words[v] = C::prepare::<I>(I::load_words(step.add(s * STEP_BYTES + v * I::LANES * 4)));
                }
                unroll!(j < C::KU, {
                    let mut w = [I::zero(); NV];
                    for v in 0..NV {
                        w[v] = C::decode::<I>(words[v], j as u32);
                        if FLAGS & ZERO != 0 {
                            w[v] = I::sub(w[v], adjust.zero[v]);
                        }
                        if FLAGS & SCALED != 0 {
                            w[v] = I::mul(w[v], adjust.scale[v]);
                        }
                    }
                    let i = s * C::KU + j;
                    for r in 0..MR {
                        let b = I::splat(*x[r].add(k + i));
                        for v in 0..NV {
                            acc[i % CH][r][v] = I::fma(b, w[v], acc[i % CH][r][v]);
                        }
                    }
                });
            });
            step = step.add(C::STEPS * STEP_BYTES);
            k += C::STEPS * C::KU;
        }
    }
}

/// Sums the `CH` chains.
///
/// # Safety
///
/// The CPU has the ISA's features.
#[inline(always)]
unsafe fn join<I: F32Isa, const MR: usize, const NV: usize, const CH: usize>(
    mut acc: [[[I::F; NV]; MR]; CH],
) -> [[I::F; NV]; MR] {
    let mut half = CH / 2;
    while half > 0 {
        for ch in 0..half {
            for r in 0..MR {
                for v in 0..NV {
                    // SAFETY: the caller's promise.
                    acc[ch][r][v] = unsafe { I::add(acc[ch][r][v], acc[ch + half][r][v]) };
                }
            }
        }
        half /= 2;
    }
    acc[0]
}

/// Scales of one group for the channels `lane .. lane + NV * LANES`.
///
/// # Safety
///
/// As [`super::RunFn`]; `scales` are those of the panel.
#[inline(always)]
pub(super) unsafe fn load_scales<I: F32Isa, const NV: usize>(
    kind: ScaleKind,
    shared: bool,
    scales: *const u8,
    group: usize,
    lane: usize,
) -> [I::F; NV] {
    // SAFETY: the panel holds 32 scales (or one) for each of its groups.
    unsafe {
        if shared {
            let one = std::slice::from_raw_parts(scales.add(group * kind.bytes()), kind.bytes());
            return [I::splat(decode_scale(kind, one)); NV];
        }
        let mut out = [I::zero(); NV];
        for (v, s) in out.iter_mut().enumerate() {
            let p = scales.add((group * NR + lane + v * I::LANES) * kind.bytes());
            *s = match kind {
                ScaleKind::F32 => I::load(p.cast()),
                ScaleKind::Bf16 => I::load_bf16(p.cast()),
                ScaleKind::F16 => I::load_f16(p.cast()),
                ScaleKind::E4m3 => I::load_e4m3(p),
                ScaleKind::E8m0 => I::load_e8m0(p),
            };
        }
        out
    }
}

/// The body: `count` rows from `first` on in `MR` accumulators, all 32 channels in sub-blocks of `NV` vectors.
///
/// # Safety
///
/// As [`super::BlockFn`].
#[inline(always)]
unsafe fn block<I: F32Isa, C: F32Code, const MR: usize, const NV: usize, const CH: usize, const FLAGS: u8>(
    a: &TileArgs<'_>,
    first: usize,
    count: usize,
) {
    let layout = a.layout;
    // SAFETY: the caller's promise: rows and panel have the sizes that the layout says.
    unsafe {
        let x: [*const f32; MR] = std::array::from_fn(|r| a.rows.row(first + r.min(count - 1)).cast());
        let k = layout.k_padded();
        for lane in (0..NR).step_by(NV * I::LANES) {
            let codes = a.panel.add(lane * 4);
            let mut adjust = Adjust::<I, NV> { scale: [I::zero(); NV], zero: [I::zero(); NV] };
            let mut sum;
            if FLAGS & SCALED == 0 {
                let mut acc = [[[I::zero(); NV]; MR]; CH];
                accumulate::<I, C, MR, NV, CH, FLAGS>(&mut acc, codes, &x, 0, k, &adjust);
                sum = join::<I, MR, NV, CH>(acc);
            } else {
                let kind = layout.format().scale.map_or(ScaleKind::F32, |s| s.kind);
                let shared = layout.scale_channels() == 1;
                let scales = a.panel.add(layout.scale_offset());
                sum = [[I::zero(); NV]; MR];
                let mut k0 = 0;
                for group in 0..layout.groups().max(1) {
                    let k1 = ((group + 1) * layout.group() - layout.k_phase()).min(k);
                    let scale = match layout.groups() {
                        0 => [I::splat(1.0); NV],
                        _ => load_scales::<I, NV>(kind, shared, scales, group, lane),
                    };
                    if FLAGS & ZERO != 0 && layout.format().zero_point {
                        for v in 0..NV {
                            let at = layout.zero_offset() + group * NR + lane + v * I::LANES;
                            adjust.zero[v] = I::load_i8(a.panel.add(at).cast());
                        }
                    }
                    if MR <= FOLD_ROWS {
                        let mut acc = [[[I::zero(); NV]; MR]; CH];
                        match FLAGS & ZERO {
                            0 => accumulate::<I, C, MR, NV, CH, 0>(&mut acc, codes, &x, k0, k1, &adjust),
                            _ => accumulate::<I, C, MR, NV, CH, ZERO>(&mut acc, codes, &x, k0, k1, &adjust),
                        }
                        let part = join::<I, MR, NV, CH>(acc);
                        for r in 0..MR {
                            for v in 0..NV {
                                sum[r][v] = I::fma(part[r][v], scale[v], sum[r][v]);
                            }
                        }
                    } else {
                        adjust.scale = scale;
                        let mut acc = [sum];
                        accumulate::<I, C, MR, NV, 1, FLAGS>(&mut acc, codes, &x, k0, k1, &adjust);
                        sum = acc[0];
                    }
                    k0 = k1;
                }
            }
            let global = a.panel.add(layout.global_offset()).cast::<f32>();
            let out = a.out.add(first * NR + lane);
            for r in 0..MR {
                if r >= count {
                    break;
                }
                for v in 0..NV {
                    let y = match layout.format().global {
                        GlobalScale::None => sum[r][v],
                        GlobalScale::Multiply => I::mul(sum[r][v], I::splat(global.read_unaligned())),
                        GlobalScale::Divide => I::div(sum[r][v], I::splat(global.read_unaligned())),
                    };
                    I::store(out.add(r * NR + v * I::LANES), y);
                }
            }
        }
    }
}

/// The body for looked-up groups: scale and zero point are loaded for each `k`.
///
/// # Safety
///
/// As [`super::BlockFn`].
#[inline(always)]
unsafe fn block_indexed<I: F32Isa, C: F32Code, const MR: usize, const NV: usize>(
    a: &TileArgs<'_>,
    first: usize,
    count: usize,
) {
    let layout = a.layout;
    let kind = layout.format().scale.map_or(ScaleKind::F32, |s| s.kind);
    // SAFETY: the caller's promise: rows and panel have the sizes that the layout says; packing has checked the groups.
    unsafe {
        let x: [*const f32; MR] = std::array::from_fn(|r| a.rows.row(first + r.min(count - 1)).cast());
        let scales = a.panel.add(layout.scale_offset());
        let index = a.panel.add(layout.index_offset()).cast::<u16>();
        for lane in (0..NR).step_by(NV * I::LANES) {
            let mut sum = [[I::zero(); NV]; MR];
            for s in 0..layout.steps() {
                let step = a.panel.add(s * STEP_BYTES + lane * 4);
                let mut words = [C::prepare::<I>(I::load_words(step)); NV];
                for v in 1..NV {
                    words[v] = C::prepare::<I>(I::load_words(step.add(v * I::LANES * 4)));
                }
                unroll!(j < C::KU, {
                    let k = s * C::KU + j;
                    let group = usize::from(u16::from_le(index.add(k).read_unaligned()));
                    let scale = load_scales::<I, NV>(kind, false, scales, group, lane);
                    for v in 0..NV {
                        let mut w = C::decode::<I>(words[v], j as u32);
                        if layout.format().zero_point {
                            let at = layout.zero_offset() + group * NR + lane + v * I::LANES;
                            w = I::sub(w, I::load_i8(a.panel.add(at).cast()));
                        }
                        w = I::mul(w, scale[v]);
                        for r in 0..MR {
                            sum[r][v] = I::fma(I::splat(*x[r].add(k)), w, sum[r][v]);
                        }
                    }
                });
            }
            for r in 0..MR {
                if r >= count {
                    break;
                }
                for v in 0..NV {
                    I::store(a.out.add((first + r) * NR + lane + v * I::LANES), sum[r][v]);
                }
            }
        }
    }
}

/// Makes, for one ISA, the entry functions with its features enabled and the table of blocks by rows.
macro_rules! entries {
    ($run:ident, $block:ident, $isa:ty, [$($feature:literal),*], [$(($mr:literal, $nv:literal, $ch:literal)),*]) => {
        /// # Safety
        ///
        /// As [`super::BlockFn`].
        $(#[target_feature(enable = $feature)])*
        unsafe fn $block<C: F32Code, const MR: usize, const NV: usize, const CH: usize, const FLAGS: u8>(
            a: &TileArgs<'_>,
            first: usize,
            count: usize,
        ) {
            // SAFETY: the caller's promise.
            unsafe { block::<$isa, C, MR, NV, CH, FLAGS>(a, first, count) }
        }

        /// # Safety
        ///
        /// As [`RunFn`].
        pub(super) unsafe fn $run<C: F32Code, const FLAGS: u8>(a: &TileArgs<'_>) {
            let table: &[Block] = &[$(($mr, $block::<C, $mr, $nv, $ch, FLAGS>)),*];
            // SAFETY: the caller's promise.
            unsafe { run_blocks(a, table) }
        }
    };
}

/// The same for looked-up groups, in a module of its own.
macro_rules! indexed {
    ($indexed:ident, $isa:ty, [$($feature:literal),*]) => {
        pub(super) mod $indexed {
            use super::*;

            /// # Safety
            ///
            /// As [`super::BlockFn`].
            $(#[target_feature(enable = $feature)])*
            unsafe fn block<C: F32Code, const MR: usize>(a: &TileArgs<'_>, first: usize, count: usize) {
                // SAFETY: the caller's promise.
                unsafe { block_indexed::<$isa, C, MR, { NR / 2 / <$isa>::LANES }>(a, first, count) }
            }

            /// # Safety
            ///
            /// As [`RunFn`].
            pub(in crate::kernel) unsafe fn run<C: F32Code>(a: &TileArgs<'_>) {
                let table: &[Block] = &[(1, block::<C, 1>), (4, block::<C, 4>)];
                // SAFETY: the caller's promise.
                unsafe { run_blocks(a, table) }
            }
        }    };
}

entries!(run_scalar, block_scalar, Scalar, [], [(1, 1, 1), (2, 1, 1)]);
indexed!(indexed_scalar, Scalar, []);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::avx2::Avx2;
    use crate::simd::avx512::{Avx512, Avx512Vbmi};

    // Sixteen registers: all four vectors of a step for one or two rows, then half of the channels at a time.
    entries!(run_avx2, block_avx2, Avx2, ["avx2,fma,f16c"], [(1, 4, 2), (2, 4, 1), (4, 2, 1), (6, 2, 1)]);
    entries!(
        run_avx512,
        block_avx512,
        Avx512,
        ["avx512f,avx512bw,avx512vl,avx512dq"],
        [(1, 2, 4), (2, 2, 2), (4, 2, 1), (6, 2, 1), (8, 2, 1)]
    );
    entries!(
        run_vbmi,
        block_vbmi,
        Avx512Vbmi,
        ["avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi"],
        [(1, 2, 4), (2, 2, 2), (4, 2, 1), (6, 2, 1), (8, 2, 1)]
    );

    indexed!(indexed_avx2, Avx2, ["avx2,fma,f16c"]);
    indexed!(indexed_avx512, Avx512, ["avx512f,avx512bw,avx512vl,avx512dq"]);

    pub(super) const AVX2_MR: usize = 6;
    pub(super) const AVX512_MR: usize = 8;
}

/// Adds the kernels of this family that `cpu` can run, poorest ISA first.
pub(super) fn kernels(format: WeightFormat, cpu: Cpu, out: &mut Vec<Kernel>) {
    macro_rules! pick {
        ($run:ident, $indexed:ident) => {
            match (format.code, format.zero_point) {
                (CodeKind::I8, _) if format.act_order => $indexed::run::<I8>,
                (CodeKind::U4, _) if format.act_order => $indexed::run::<U4>,
                (CodeKind::F32, _) => $run::<F32, 0>,
                (CodeKind::Bf16, _) => $run::<Bf16, 0>,
                (CodeKind::F16, _) => $run::<F16, 0>,
                (CodeKind::E4m3, _) => $run::<E4m3, SCALED>,
                (CodeKind::I8, _) => $run::<I8, { SCALED | ZERO }>,
                (CodeKind::U4, false) => $run::<U4, SCALED>,
                (CodeKind::U4, true) => $run::<U4, { SCALED | ZERO }>,
                (CodeKind::E2m1, _) => $run::<E2m1, SCALED>,
            }
        };
    }
    let mut add = |level: IsaLevel, isa: &str, mr: usize, run: RunFn| {
        out.push(Kernel::new(Family::F32Fma, level, isa, format, Operand::F32, mr, run));
    };
    add(IsaLevel::Scalar, "scalar", 2, pick!(run_scalar, indexed_scalar));
    #[cfg(target_arch = "x86_64")]
    {
        use x86::{AVX2_MR, AVX512_MR, indexed_avx2, indexed_avx512, run_avx2, run_avx512, run_vbmi};
        if cpu.avx2() {
            add(IsaLevel::Avx2, "avx2", AVX2_MR, pick!(run_avx2, indexed_avx2));
        }
        if cpu.avx512() {
            add(IsaLevel::Avx512, "avx512", AVX512_MR, pick!(run_avx512, indexed_avx512));
        }
        if cpu.avx512_vbmi() && format.code == CodeKind::E4m3 {
            let run: RunFn =
                if format.scale.is_some() { run_vbmi::<E4m3, SCALED> } else { run_vbmi::<E4m3, 0> };
            add(IsaLevel::Avx512Vnni, "avx512vbmi", AVX512_MR, run);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = cpu;
}
