//! Packing is a permutation: every layout gives the checkpoint back, and bad weights are refused by their place.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

#[path = "kernels/support.rs"]
mod support;

use lk_core::Dtype;
use lk_core::format::{WeightFormat, reference};
use lk_core::tile::{CheckpointView, Grid, PackError, TileLayout, pack_panels, unpack};
use proptest::prelude::*;
use support::{Rng, random_packed};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
const DEPTHS: [usize; 13] = [1, 16, 32, 48, 64, 80, 96, 160, 192, 320, 640, 1344, 2880];

/// `count` finite elements.
fn elements(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..count)
        .flat_map(|_| {
            let x = rng.unit();
            match dtype {
                Dtype::F32 => x.to_le_bytes().to_vec(),
                Dtype::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                _ => half::f16::from_f32(x).to_le_bytes().to_vec(),
            }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn unpack_inverts_pack(n in 1usize..100, k in prop::sample::select(&DEPTHS[..]), d in 0usize..3, seed: u64) {
        let dtype = DTYPES[d];
        let bytes = elements(dtype, n * k, seed);
        let view = CheckpointView::plain(dtype, Grid::rows(&bytes, dtype.bytes(), k), n, k).unwrap();
        let layout = TileLayout::new(view.format(), n, k).unwrap();
        let mut packed = vec![0xa5; layout.bytes()];
        pack_panels(&view, &layout, 0..layout.panels(), &mut packed, 1).unwrap();
        prop_assert!(unpack(&layout, &packed).codes == bytes);
        // Padding decodes to zero: the sum over everything equals the sum over the matrix.
        let whole = TileLayout::new(view.format(), layout.panels() * 32, layout.k_padded()).unwrap();
        let nonzero = reference::decode(&whole, &packed).iter().filter(|x| **x != 0.0).count();
        let wanted = reference::decode(&layout, &packed).iter().filter(|x| **x != 0.0).count();
        prop_assert_eq!(nonzero, wanted);
    }

    #[test]
    fn panel_ranges_and_alternating_panels_are_the_same_panels(n in 1usize..200, cut in 0usize..7, seed: u64) {
        let k = 80;
        let bytes = elements(Dtype::Bf16, n * k, seed);
        let view = CheckpointView::plain(Dtype::Bf16, Grid::rows(&bytes, 2, k), n, k).unwrap();
        let layout = TileLayout::new(view.format(), n, k).unwrap();
        let mut whole = vec![0; layout.bytes()];
        pack_panels(&view, &layout, 0..layout.panels(), &mut whole, 1).unwrap();
        let cut = cut.min(layout.panels());
        let mut paired = vec![0x11; 2 * layout.bytes()];
        let (head, tail) = paired.split_at_mut(2 * cut * layout.panel_bytes());
        pack_panels(&view, &layout, 0..cut, head, 2).unwrap();
        pack_panels(&view, &layout, cut..layout.panels(), tail, 2).unwrap();
        for p in 0..layout.panels() {
            prop_assert!(layout.panel(&paired, 2 * p) == layout.panel(&whole, p));
            prop_assert!(layout.panel(&paired, 2 * p + 1).iter().all(|&b| b == 0x11));
        }
    }

    #[test]
    fn strided_and_transposed_sources_are_the_same_matrix(n in 1usize..70, k in 1usize..70, d in 0usize..3, seed: u64) {
        let dtype = DTYPES[d];
        let size = dtype.bytes();
        // Columns 3 .. 3 + k of rows 1, 3, 5, … of a wider matrix.
        let wide = k + 5;
        let bytes = elements(dtype, (2 * n + 1) * wide, seed);
        let strided = Grid::rows(&bytes, size, wide).every(1, 2).skip(0, 3);
        let mut dense = Vec::new();
        let mut turned = vec![0; n * k * size];
        for row in 0..n {
            for col in 0..k {
                let element = strided.get(row, col);
                dense.extend_from_slice(element);
                turned[(col * n + row) * size..][..size].copy_from_slice(element);
            }
        }
        let pack = |grid: Grid<'_>| {
            let view = CheckpointView::plain(dtype, grid, n, k).unwrap();
            let layout = TileLayout::new(view.format(), n, k).unwrap();
            let mut packed = vec![0; layout.bytes()];
            pack_panels(&view, &layout, 0..layout.panels(), &mut packed, 1).unwrap();
            packed
        };
        let expected = pack(Grid::rows(&dense, size, k));
        prop_assert!(pack(strided) == expected);
        prop_assert!(pack(Grid::rows(&turned, size, n).transposed()) == expected);
    }

    #[test]
    fn one_bad_weight_is_refused_by_row_and_column(
        n in 1usize..80, k in 1usize..90, at: prop::sample::Index, d in 0usize..3, infinite: bool,
    ) {
        let dtype = DTYPES[d];
        let mut bytes = elements(dtype, n * k, 7);
        let at = at.index(n * k);
        let bad = if infinite { f32::NEG_INFINITY } else { f32::NAN };
        let slot = &mut bytes[at * dtype.bytes()..][..dtype.bytes()];
        match dtype {
            Dtype::F32 => slot.copy_from_slice(&bad.to_le_bytes()),
            Dtype::Bf16 => slot.copy_from_slice(&half::bf16::from_f32(bad).to_le_bytes()),
            _ => slot.copy_from_slice(&half::f16::from_f32(bad).to_le_bytes()),
        }
        let view = CheckpointView::plain(dtype, Grid::rows(&bytes, dtype.bytes(), k), n, k).unwrap();
        let layout = TileLayout::new(view.format(), n, k).unwrap();
        let mut packed = vec![0; layout.bytes()];
        let result = pack_panels(&view, &layout, 0..layout.panels(), &mut packed, 1);
        prop_assert_eq!(result, Err(PackError::NotFinite { part: "weight", row: at / k, col: at % k }));
    }
}

#[test]
fn views_and_destinations_of_the_wrong_size_are_refused() {
    let bytes = elements(Dtype::Bf16, 64 * 32, 1);
    assert!(CheckpointView::plain(Dtype::Bf16, Grid::rows(&bytes, 2, 32), 65, 32).is_err());
    assert!(CheckpointView::plain(Dtype::F32, Grid::rows(&bytes, 2, 32), 64, 32).is_err());
    assert!(CheckpointView::plain(Dtype::U8, Grid::rows(&bytes, 1, 32), 64, 32).is_err());
    let view = CheckpointView::plain(Dtype::Bf16, Grid::rows(&bytes, 2, 32), 64, 32).unwrap();
    let layout = TileLayout::new(WeightFormat::BF16, 64, 32).unwrap();
    let other = TileLayout::new(WeightFormat::F16, 64, 32).unwrap();
    let mut dst = vec![0; layout.bytes()];
    assert!(pack_panels(&view, &other, 0..2, &mut dst, 1).is_err());
    assert!(pack_panels(&view, &layout, 0..3, &mut dst, 1).is_err());
    assert!(pack_panels(&view, &layout, 0..2, &mut dst[1..], 1).is_err());
    assert!(pack_panels(&view, &layout, 0..2, &mut dst, 2).is_err());
}

#[test]
fn layouts_hold_their_parts_without_overlap() {
    for format in support::formats() {
        for (n, k) in [(1, 1), (33, 48), (96, 2880), (32, 1344)] {
            let layout = TileLayout::slice_of(format, n, k, 0, 0, k).unwrap();
            assert_eq!(layout.panel_bytes() % 64, 0);
            assert_eq!(layout.k_padded() % 32, 0);
            assert_eq!(layout.scale_offset(), layout.k_padded() * 32 * format.code.bits() / 8);
            let scales =
                layout.groups() * layout.scale_channels() * format.scale.map_or(0, |s| s.kind.bytes());
            assert!(layout.scale_offset() + scales <= layout.zero_offset());
            assert!(layout.global_offset() <= layout.panel_bytes());
            // Packing what was unpacked is covered above; here every code of a full matrix comes back by its place.
            let packed = random_packed(&layout, 1);
            assert_eq!(unpack(&layout, &packed).codes.len(), n * (k * format.code.bits()).div_ceil(8));
        }
    }
    assert!(TileLayout::new(WeightFormat::BF16, 0, 32).is_err());
    assert!(
        TileLayout::sliced(WeightFormat::fp8_block(lk_core::format::ScaleKind::F32, 128, 128), 32, 64, 0, 8)
            .is_err()
    );
}
