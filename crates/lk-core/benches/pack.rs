//! Packing: checkpoint rows to panels, held against copying the same bytes in the same run.
//!
//! `cargo bench --bench pack -- [--quick] [--threads N]`. GB/s count the bytes of the checkpoint once.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs, reason = "a bench")]

use lk_core::Dtype;
use lk_core::limits;
use lk_core::tile::{CheckpointView, Grid, TileLayout, pack_panels};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value =
        |name: &str| arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).cloned();
    let quick = arguments.iter().any(|a| a == "--quick");
    let threads =
        value("--threads").and_then(|t| t.parse().ok()).unwrap_or_else(|| limits::allowed_cpus().len());
    let (n, k) = (768, 2048);
    let matrices = if quick { 4 } else { 64 };
    println!("{threads} threads; [{n}, {k}]");
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let bytes = n * k * dtype.bytes();
        for (what, copy) in [("copy", true), ("pack", false)] {
            let rounds = limits::together(
                Some(threads),
                |_| (vec![0x3cu8; bytes * matrices], vec![0u8; bytes * matrices]),
                |(from, to)| {
                    for (from, to) in from.chunks_exact(bytes).zip(to.chunks_exact_mut(bytes)) {
                        if copy {
                            to.copy_from_slice(from);
                        } else {
                            let view = CheckpointView::plain(dtype, Grid::rows(from, dtype.bytes(), k), n, k)
                                .unwrap();
                            let layout = TileLayout::new(view.format(), n, k).unwrap();
                            pack_panels(&view, &layout, 0..layout.panels(), to, 1).unwrap();
                        }
                    }
                },
                4,
            )
            .unwrap();
            let best = rounds.iter().map(|r| r.1).min().unwrap().as_secs_f64();
            println!(
                "{what} {dtype}: {:.1} GB/s, {:.0} us",
                (bytes * matrices * threads) as f64 / best / 1e9,
                best * 1e6
            );
        }
    }
}
