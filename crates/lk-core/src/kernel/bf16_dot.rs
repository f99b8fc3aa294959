//! Family `bf16dot`: rows are bf16, pairs of `k` are multiplied and added to f32 sums by `vdpbf16ps`.
//!
//! A word of a 16-bit panel is the instruction's operand as it lies there; the row's pair is broadcast.

use super::{Block, Family, Kernel, Operand, TileArgs, run_blocks};
use crate::format::{CodeKind, WeightFormat};
use crate::simd::{Cpu, IsaLevel};
use crate::tile::{NR, STEP_BYTES};
use std::arch::x86_64::*;
use std::mem::transmute;

/// Bytes ahead of the current step that are asked for.
const PREFETCH_BYTES: usize = 4096;

/// `count` rows from `first` on in `MR` accumulators; steps are dealt over `CH` accumulators.
///
/// # Safety
///
/// As [`super::BlockFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn block<const MR: usize, const CH: usize>(a: &TileArgs<'_>, first: usize, count: usize) {
    // SAFETY: the caller's promise: rows and panel have the sizes that the layout says; `K_TILE` is a multiple of CH steps.
    unsafe {
        let x: [*const u8; MR] = std::array::from_fn(|r| a.rows.row(first + r.min(count - 1)));
        let mut acc = [[[_mm512_setzero_ps(); 2]; MR]; CH];
        let steps = a.layout.steps();
        let mut s = 0;
        while s < steps {
            for ch in 0..CH {
                let step = a.panel.add((s + ch) * STEP_BYTES);
                _mm_prefetch::<_MM_HINT_T0>(step.wrapping_add(PREFETCH_BYTES).cast());
                _mm_prefetch::<_MM_HINT_T0>(step.wrapping_add(PREFETCH_BYTES + 64).cast());
                let w: [__m512bh; 2] = [
                    transmute(_mm512_loadu_si512(step.cast())),
                    transmute(_mm512_loadu_si512(step.add(64).cast())),
                ];
                for r in 0..MR {
                    let pair = x[r].add((s + ch) * 4).cast::<i32>().read_unaligned();
                    let b: __m512bh = transmute(_mm512_set1_epi32(pair));
                    acc[ch][r][0] = _mm512_dpbf16_ps(acc[ch][r][0], w[0], b);
                    acc[ch][r][1] = _mm512_dpbf16_ps(acc[ch][r][1], w[1], b);
                }
            }
            s += CH;
        }
        for r in 0..MR {
            if r >= count {
                break;
            }
            for v in 0..2 {
                let mut sum = acc[0][r][v];
                for chain in acc.iter().skip(1) {
                    sum = _mm512_add_ps(sum, chain[r][v]);
                }
                _mm512_storeu_ps(a.out.add((first + r) * NR + v * 16), sum);
            }
        }
    }
}

const TABLE: [Block; 6] = [
    (1, block::<1, 4>),
    (2, block::<2, 4>),
    (4, block::<4, 2>),
    (6, block::<6, 2>),
    (8, block::<8, 1>),
    (12, block::<12, 1>),
];

/// # Safety
///
/// As [`super::RunFn`].
unsafe fn run(a: &TileArgs<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run_blocks(a, &TABLE) }
}

/// Adds the kernels of this family that `cpu` can run.
pub(super) fn kernels(format: WeightFormat, cpu: Cpu, out: &mut Vec<Kernel>) {
    if cpu.avx512_bf16() && format.code == CodeKind::Bf16 {
        let (family, level) = (Family::Bf16Dot, IsaLevel::Avx512Bf16);
        out.push(Kernel::new(
            family,
            level,
            "avx512bf16",
            format,
            Operand::Bf16,
            TABLE[TABLE.len() - 1].0,
            run,
        ));
    }
}
