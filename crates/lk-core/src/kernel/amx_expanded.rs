//! Family `bf16amx` for codes of 8 and 4 bits: a stretch of a panel is expanded to bf16 and multiplied on tiles.
//!
//! The expansion is paid once for all rows. Up to 16 rows it goes through a stretch that the first-level cache holds; more
//! rows pass over the whole panel expanded, which the second-level cache holds.

use super::amx::{
    Ahead, BLOCK_BYTES, Source, add_few, one, store_both, store_few, tiles, two, with_strided_rows, zero_few,
};
use super::expand::{ExpandFn, Scaling, function, group_end};
use super::f32_fma::load_scales;
use super::{Family, Kernel, Operand, RunFn, TileArgs};
use crate::format::{CodeKind, GlobalScale, ScaleKind, WeightFormat};
use crate::simd::amx::{TileConfig, release};
use crate::simd::avx512::Avx512Vbmi;
use crate::simd::{Cpu, F32Isa, IsaLevel};
use crate::tile::{K_TILE, NR};
use std::cell::RefCell;

type I = Avx512Vbmi;

/// `k` that are expanded at once for few rows. Short, so that tile products of one stretch overlap with the expansion of the
/// next; two buffers take turns.
const STRETCH: usize = 64;

/// Bytes of the longest stretch that few rows expand at once: a group, or [`STRETCH`].
const fn stretch_bytes(k: usize) -> usize {
    (k / K_TILE + 2) * BLOCK_BYTES
}

/// One line of scratch.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

thread_local! {
    /// Expanded weights of this thread.
    static EXPANDED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
///
/// As [`RunFn`], for AMX with AVX-512 VBMI.
unsafe fn run(a: &TileArgs<'_>, scaling: Scaling) {
    let Some(expand) = function(a.layout.format(), scaling) else {
        unreachable!("kernels are made for formats that can be expanded")
    };
    EXPANDED.with_borrow_mut(|lines| {
        // A group that begins and ends inside of a block of K_TILE takes one block more.
        let blocks = a.layout.k_padded() / K_TILE + a.layout.groups() + 1;
        let wanted = (blocks * BLOCK_BYTES).max(2 * stretch_bytes(STRETCH.max(a.layout.group()))) / 64;
        if lines.len() < wanted {
            lines.resize(wanted, Line([0; 64]));
        }
        let buffer = lines.as_mut_ptr().cast::<u8>();
        // SAFETY: the caller's promise; the buffer holds every block of the panel, groups apart.
        unsafe {
            with_strided_rows(a, |x, stride| match scaling {
                Scaling::Groups => by_group(a, expand, x, stride, buffer),
                Scaling::Weights | Scaling::Channels => {
                    whole(a, expand, x, stride, buffer);
                    scale_channels(a);
                }
            });
            release();
        }
    });
}

/// # Safety
///
/// As [`run`]; `buffer` holds the expanded panel.
unsafe fn whole(a: &TileArgs<'_>, expand: ExpandFn, x: *const u8, stride: usize, buffer: *mut u8) {
    let (m, k) = (a.rows.m(), a.layout.k_padded());
    // SAFETY: the caller's promise.
    unsafe {
        if m > 16 {
            expand(a, 0, k, buffer);
            let next = Source::Buffer(a.panel.wrapping_add(a.layout.panel_bytes()), a.layout.panel_bytes());
            return tiles(buffer, x, stride, m, k, a.out, next);
        }
        let rows = m as u8;
        TileConfig::new([rows, rows, rows, rows, rows, rows, 16, 16]).load();
        for k0 in (0..k).step_by(STRETCH) {
            let k1 = (k0 + STRETCH).min(k);
            let buffer = buffer.add(k0 / STRETCH % 2 * stretch_bytes(STRETCH));
            expand(a, k0, k1, buffer);
            add_few::<false>(buffer, x.add(k0 * 2), stride, (k1 - k0) / K_TILE);
        }
        store_few(m, a.out);
    }
}

/// Sums of each group times its scale.
///
/// # Safety
///
/// As [`run`]; `buffer` holds the expanded groups.
unsafe fn by_group(a: &TileArgs<'_>, expand: ExpandFn, x: *const u8, stride: usize, buffer: *mut u8) {
    let (layout, m) = (a.layout, a.rows.m());
    let span = |group: usize| {
        let k0 = if group == 0 { 0 } else { group_end(layout, group - 1) };
        (k0, group_end(layout, group))
    };
    let blocks = |k0: usize, k1: usize| k1.div_ceil(K_TILE) - k0 / K_TILE;
    let mut part = [0f32; 32 * NR];
    // SAFETY: the caller's promise; a block of K_TILE of x holds the blocks of every group.
    unsafe {
        if m <= 16 {
            let rows = m as u8;
            TileConfig::new([rows, rows, rows, rows, rows, rows, 16, 16]).load();
            let odd_part = part.as_mut_ptr().add(16 * NR);
            let whole_blocks = layout.group() == K_TILE && layout.k_phase() == 0;
            let mut group = 0;
            let mut turn = 0;
            while group < layout.groups() {
                // Two groups of one block are the even and the odd sum; a longer group is the sum of both.
                let last = if whole_blocks { (group + 1).min(layout.groups() - 1) } else { group };
                let (k0, k1) = (span(group).0, span(last).1);
                let buffer = buffer.add(turn * stretch_bytes(STRETCH.max(layout.group())));
                expand(a, k0, k1, buffer);
                zero_few();
                add_few::<false>(buffer, x.add(k0 / K_TILE * K_TILE * 2), stride, blocks(k0, k1));
                store_both(part.as_mut_ptr(), odd_part);
                add_scaled(a, [group, last], part.as_ptr(), Some(odd_part), 0, m);
                group = last + 1;
                turn = 1 - turn;
            }
            return;
        }
        let mut at = buffer;
        for group in 0..layout.groups() {
            let (k0, k1) = span(group);
            expand(a, k0, k1, at);
            at = at.add(blocks(k0, k1) * BLOCK_BYTES);
        }
        let bytes = layout.panel_bytes();
        let products = m.div_ceil(32) * at.offset_from_unsigned(buffer) / BLOCK_BYTES;
        let mut next = Ahead::spread(a.panel.wrapping_add(bytes), bytes, products);
        for first in (0..m).step_by(32) {
            let rows = (m - first).min(32);
            let lower = rows.saturating_sub(16) as u8;
            if lower == 0 {
                TileConfig::new([rows as u8, rows as u8, 0, 0, rows as u8, 0, 16, 16]).load();
            } else {
                TileConfig::new([16, 16, lower, lower, 16, lower, 16, 16]).load();
            }
            let mut at = buffer;
            for group in 0..layout.groups() {
                let (k0, k1) = span(group);
                let n = blocks(k0, k1);
                let x = x.add(first * stride + k0 / K_TILE * K_TILE * 2);
                if lower == 0 {
                    next = one(at, x, stride, 0, n * K_TILE, part.as_mut_ptr(), next);
                } else {
                    next = two(at, x, stride, 0, n * K_TILE, part.as_mut_ptr(), next);
                }
                at = at.add(n * BLOCK_BYTES);
                add_scaled(a, [group; 2], part.as_ptr(), None, first, rows);
            }
        }
    }
}

/// `out[first + r] = or += even[r] * scale[groups[0]] + odd[r] * scale[groups[1]]` for `rows` rows; the first group sets, the
/// last applies the matrix's scale.
///
/// # Safety
///
/// As [`run`]; `even` and `odd` hold the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn add_scaled(
    a: &TileArgs<'_>,
    groups: [usize; 2],
    even: *const f32,
    odd: Option<*mut f32>,
    first: usize,
    rows: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = [scales_of(a, groups[0]), scales_of(a, groups[1])];
        for r in 0..rows {
            for v in 0..2 {
                let out = a.out.add((first + r) * NR + v * I::LANES);
                let at = r * NR + v * I::LANES;
                let mut sum = if groups[0] == 0 { I::zero() } else { I::load(out) };
                sum = I::fma(I::load(even.add(at)), scale[0][v], sum);
                if let Some(odd) = odd {
                    sum = I::fma(I::load(odd.add(at)), scale[1][v], sum);
                }
                I::store(out, sum);
            }
        }
        if groups[1] + 1 == a.layout.groups() {
            scale_matrix(a, first, rows);
        }
    }
}

#[inline(always)]
unsafe fn scales_of(a: &TileArgs<'_>, group: usize) -> [<I as F32Isa>::F; 2] {
    let layout = a.layout;
    let kind = layout.format().scale.map_or(ScaleKind::F32, |s| s.kind);
    // SAFETY: the caller's promise: the panel holds the scales of its groups.
    unsafe {
        let scales = a.panel.add(layout.scale_offset());
        load_scales::<I, 2>(kind, layout.scale_channels() == 1, scales, group, 0)
    }
}

/// Applies the scales of channels, if that is what the format has, and the matrix's scale.
///
/// # Safety
///
/// As [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn scale_channels(a: &TileArgs<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if Scaling::of(a.layout.format()) == Scaling::Channels && a.layout.groups() > 0 {
            let scale = scales_of(a, 0);
            for i in 0..2 * a.rows.m() {
                let out = a.out.add(i * I::LANES);
                I::store(out, I::mul(I::load(out), scale[i % 2]));
            }
        }
        scale_matrix(a, 0, a.rows.m());
    }
}

#[inline(always)]
unsafe fn scale_matrix(a: &TileArgs<'_>, first: usize, rows: usize) {
    let global = a.layout.format().global;
    if global == GlobalScale::None {
        return;
    }
    // SAFETY: the caller's promise: the panel ends with the matrix's scale.
    unsafe {
        let value = I::splat(a.panel.add(a.layout.global_offset()).cast::<f32>().read_unaligned());
        for i in 2 * first..2 * (first + rows) {
            let out = a.out.add(i * I::LANES);
            let y = I::load(out);
            I::store(out, if global == GlobalScale::Divide { I::div(y, value) } else { I::mul(y, value) });
        }
    }
}

/// # Safety
///
/// As [`RunFn`]; so for the two below.
unsafe fn run_weights(a: &TileArgs<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run(a, Scaling::Weights) }
}

/// # Safety
///
/// As [`RunFn`].
unsafe fn run_channels(a: &TileArgs<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run(a, Scaling::Channels) }
}

/// # Safety
///
/// As [`RunFn`].
unsafe fn run_groups(a: &TileArgs<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run(a, Scaling::Groups) }
}

/// Adds the kernels of this family that `cpu` can run.
pub(super) fn kernels(format: WeightFormat, cpu: Cpu, out: &mut Vec<Kernel>) {
    let scaling = Scaling::of(format);
    let expandable =
        !matches!(format.code, CodeKind::F32 | CodeKind::F16 | CodeKind::Bf16) && !format.act_order;
    if !cpu.amx() || !cpu.avx512_vbmi() || !expandable || function(format, scaling).is_none() {
        return;
    }
    let run: RunFn = match scaling {
        Scaling::Weights => run_weights,
        Scaling::Channels => run_channels,
        Scaling::Groups => run_groups,
    };
    out.push(Kernel::new(Family::Bf16Amx, IsaLevel::Amx, "amx", format, Operand::Bf16, 16, run));
}
