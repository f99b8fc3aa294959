//! Every kernel against an f64 oracle, every vector operation against its definition.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

#[path = "kernels/support.rs"]
mod support;

use half::bf16;
use lk_core::Dtype;
use lk_core::format::{WeightFormat, reference};
use lk_core::kernel::{Family, Kernel, KernelSet, Operand, Rows};
use lk_core::simd::{Cpu, IsaLevel};
use lk_core::tile::{NR, TileLayout};
use support::{Rng, formats, random_packed};

const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 16, 17, 64];
const CHANNELS: [usize; 3] = [32, 64, 96];
const DEPTHS: [usize; 12] = [16, 32, 48, 64, 80, 96, 160, 192, 320, 640, 1344, 2880];

/// Rows of random values with zeros in the padding, in both operand types; the f32 ones are exact in bf16.
struct Inputs {
    f32: Vec<f32>,
    bf16: Vec<u16>,
    stride: usize,
}

impl Inputs {
    fn new(m: usize, layout: &TileLayout, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Rows need not lie at a multiple of anything.
        let stride = layout.k_padded() + 3;
        let mut f32 = vec![0.0; m * stride];
        for row in f32.chunks_exact_mut(stride) {
            for x in &mut row[..layout.k()] {
                *x = bf16::from_f32(rng.unit() * 3.0).to_f32();
            }
            // Not part of the row: a kernel that reads on must fail.
            row[layout.k_padded()..].fill(f32::NAN);
        }
        let bf16 = f32.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        Self { f32, bf16, stride }
    }

    fn rows(&self, operand: Operand, width: usize) -> Rows<'_> {
        match operand {
            Operand::F32 => Rows::f32(&self.f32, width, self.stride),
            Operand::Bf16 => Rows::bf16(&self.bf16, width, self.stride),
        }
    }
}

/// Largest error relative to `Σ |x w|`, the natural scale of a sum's rounding.
fn worst_error(
    layout: &TileLayout,
    weights: &[f32],
    inputs: &Inputs,
    m: usize,
    n: usize,
    panel: usize,
    out: &[f32],
) -> f64 {
    let mut worst = 0.0f64;
    for r in 0..m {
        let x = &inputs.f32[r * inputs.stride..][..layout.k()];
        for c in 0..NR {
            let got = f64::from(out[r * NR + c]);
            let row = panel * NR + c;
            let (mut sum, mut size) = (0.0f64, 0.0f64);
            if row < n {
                for (&x, &w) in x.iter().zip(&weights[row * layout.k()..]) {
                    sum += f64::from(x) * f64::from(w);
                    size += (f64::from(x) * f64::from(w)).abs();
                }
            }
            let error = if size == 0.0 { got.abs() } else { (got - sum).abs() / size };
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    worst
}

fn bound(family: Family, k: usize) -> f64 {
    // f32 sums: a rounding walk over k terms, two more roundings for scales. The inputs are exact in each family.
    match family {
        Family::F32Fma | Family::Bf16Dot | Family::Bf16Amx => 1e-6 * (k as f64).sqrt().max(4.0),
    }
}

fn check(kernel: &Kernel, layout: &TileLayout, m: usize, seed: u64, failures: &mut Vec<String>) {
    let packed = random_packed(layout, seed);
    let weights = reference::decode(layout, &packed);
    let inputs = Inputs::new(m, layout, seed ^ 0x55);
    let rows = inputs.rows(kernel.operand(), layout.k_padded());
    assert_eq!(rows.m(), m);
    for p in 0..layout.panels() {
        let mut out = vec![f32::NAN; m * NR + 1];
        kernel.run(layout.panel(&packed, p), layout, &rows, &mut out);
        let error = worst_error(layout, &weights, &inputs, m, layout.n(), p, &out);
        if error > bound(kernel.family(), layout.k()) || !out[m * NR].is_nan() {
            failures.push(format!(
                "{} {} n={} k={} phase={} m={m} panel={p}: error {error:.2e}",
                kernel.name(),
                layout.format(),
                layout.n(),
                layout.k(),
                layout.k_phase()
            ));
        }
    }
}

#[test]
fn every_kernel_agrees_with_the_oracle() {
    let cpu = Cpu::detect();
    println!("cpu: {cpu}");
    let mut failures = Vec::new();
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for format in formats() {
        for kernel in KernelSet::all(format, cpu) {
            // All depths at few rows, all rows at few depths, all channel counts at one of each.
            for (i, &k) in DEPTHS.iter().enumerate() {
                let layout = TileLayout::slice_of(format, 32 - i % 2, k, 0, 0, k).unwrap();
                for m in [1, 2, 5] {
                    check(&kernel, &layout, m, (k + m) as u64, &mut failures);
                }
            }
            for m in ROWS {
                for k in [48, 320] {
                    let layout = TileLayout::slice_of(format, 32, k, 0, 0, k).unwrap();
                    check(&kernel, &layout, m, (k * m) as u64, &mut failures);
                }
            }
            for n in CHANNELS {
                let layout = TileLayout::slice_of(format, n - 1, 192, 0, 0, 192).unwrap();
                check(&kernel, &layout, 4, n as u64, &mut failures);
            }
            *seen.entry(kernel.name().to_owned()).or_default() += 1;
        }
    }
    println!("{} kernels: {seen:?}", seen.len());
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn slices_that_begin_inside_a_scale_group_use_the_right_scales() {
    let cpu = Cpu::detect();
    let mut failures = Vec::new();
    for format in formats() {
        let Some(group) = format.scale.map(|s| s.group as usize).filter(|&g| g > 32) else { continue };
        for kernel in KernelSet::all(format, cpu) {
            for k_start in [32, group - 16] {
                let layout = TileLayout::slice_of(format, 40, 192, 96, k_start, 1024).unwrap();
                for m in [1, 3] {
                    check(&kernel, &layout, m, k_start as u64, &mut failures);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn picked_rows_and_ranges_are_the_rows_they_name() {
    let cpu = Cpu::detect();
    let layout = TileLayout::slice_of(WeightFormat::BF16, 32, 96, 0, 0, 96).unwrap();
    let packed = random_packed(&layout, 3);
    let inputs = Inputs::new(9, &layout, 4);
    for kernel in KernelSet::all(WeightFormat::BF16, cpu) {
        let rows = inputs.rows(kernel.operand(), layout.k_padded());
        let mut all = vec![0.0; 9 * NR];
        kernel.run(layout.panel(&packed, 0), &layout, &rows, &mut all);
        let index = [7, 0, 7, 3];
        let mut some = vec![0.0; 4 * NR];
        kernel.run(layout.panel(&packed, 0), &layout, &rows.pick(&index), &mut some);
        let mut range = vec![0.0; 2 * NR];
        kernel.run(layout.panel(&packed, 0), &layout, &rows.pick(&index).range(1, 2), &mut range);
        for (i, &from) in index.iter().enumerate() {
            for c in 0..NR {
                let (a, b) = (some[i * NR + c], all[from as usize * NR + c]);
                assert!((a - b).abs() <= 1e-4, "{}: row {i}", kernel.name());
            }
        }
        assert_eq!(range[..NR].len(), NR);
        assert!((range[0] - all[0]).abs() <= 1e-4 && (range[NR] - all[7 * NR]).abs() <= 1e-4);
    }
}

#[test]
fn a_forced_level_uses_nothing_above_it() {
    let cpu = Cpu::detect();
    for level in IsaLevel::ALL {
        let Ok(capped) = cpu.capped(level) else {
            println!("skipped: {level} is not supported by this CPU");
            continue;
        };
        for format in formats() {
            for activation in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let set = KernelSet::build(format, capped, activation).unwrap();
                for kernel in set.kernels() {
                    assert!(kernel.isa() <= level, "{} under {level}", kernel.name());
                    assert!(
                        activation == Dtype::Bf16 || kernel.operand() == Operand::F32,
                        "{}",
                        kernel.name()
                    );
                }
            }
        }
    }
}

#[test]
fn measuring_chooses_a_candidate_for_every_row_count() {
    let cpu = Cpu::detect();
    for format in [WeightFormat::BF16, WeightFormat::MXFP4] {
        let mut set = KernelSet::build(format, cpu, Dtype::Bf16).unwrap();
        set.measure(96, 192).unwrap();
        let names: Vec<_> = set.kernels().iter().map(|k| k.name().to_owned()).collect();
        for m in [1, 2, 3, 7, 16, 17, 1000] {
            assert!(names.iter().any(|n| n == set.select(m).name()));
        }
        for family in Family::ALL {
            match set.pin(family) {
                Ok(()) => assert!([1, 5, 99].iter().all(|&m| set.select(m).family() == family)),
                Err(e) => assert!(e.to_string().contains(family.name()), "{e}"),
            }
        }
    }
}

#[test]
fn limits_are_measured_for_every_family_of_this_cpu() {
    let read = lk_core::limits::read_bandwidth_over(Some(1), 64 << 20, 1).unwrap();
    assert!(read > 0.1 && read < 10_000.0, "{read} GB/s");
    let peaks = lk_core::limits::compute_peaks(Some(1)).unwrap();
    println!("{peaks:?}");
    for kernel in KernelSet::all(WeightFormat::BF16, Cpu::detect()) {
        let peak = peaks.get(kernel.family().name()).copied().unwrap_or_default();
        assert!(peak > 0.1 && peak < 1e6, "{}: {peak} GFLOP/s", kernel.name());
    }
    assert!(!lk_core::limits::cpu_features().is_empty());
}
