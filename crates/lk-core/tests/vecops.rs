//! The operations around the kernels, of every ISA of this CPU, against f64 and scalar definitions.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::float_cmp, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

#[path = "kernels/support.rs"]
mod support;

use half::{bf16, f16};
use lk_core::kernel::{Activation, ActivationFn, ActivationParams, OutRow, VecOps};
use lk_core::simd::{Cpu, IsaLevel};
use support::Rng;

fn all_ops() -> Vec<&'static VecOps> {
    let cpu = Cpu::detect();
    [IsaLevel::Scalar, IsaLevel::Avx2, IsaLevel::Avx512]
        .into_iter()
        .filter_map(|level| cpu.capped(level).ok())
        .map(VecOps::get)
        .collect()
}

const LENGTHS: [usize; 9] = [0, 1, 7, 8, 15, 16, 17, 32, 77];

#[test]
fn conversions_round_to_nearest_even_and_keep_special_values() {
    let mut rng = Rng::new(1);
    let special = [
        0.0f32,
        -0.0,
        1.0,
        f32::MIN_POSITIVE,
        1e-45,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        65504.0,
        65520.0,
        6e-8,
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f81_8000),
        f32::from_bits(0x3f80_7fff),
        f32::NAN,
        f32::from_bits(0x7f80_0001),
    ];
    for ops in all_ops() {
        for len in LENGTHS {
            let src: Vec<f32> = (0..len)
                .map(|i| {
                    special.get(i % 40).copied().unwrap_or_else(|| rng.unit() * (rng.unit() * 20.0).exp2())
                })
                .collect();
            let (mut b, mut h) = (vec![0u16; len], vec![0u16; len]);
            ops.f32_to_bf16(&src, &mut b);
            ops.f32_to_f16(&src, &mut h);
            let (mut bf, mut hf) = (vec![0f32; len], vec![0f32; len]);
            ops.bf16_to_f32(&b, &mut bf);
            ops.f16_to_f32(&h, &mut hf);
            for i in 0..len {
                let (wb, wh) = (bf16::from_f32(src[i]), f16::from_f32(src[i]));
                assert_eq!(src[i].is_nan(), bf[i].is_nan(), "{} {:e}", ops.name(), src[i]);
                if !src[i].is_nan() {
                    assert_eq!((b[i], h[i]), (wb.to_bits(), wh.to_bits()), "{} {:e}", ops.name(), src[i]);
                    assert_eq!((bf[i], hf[i]), (wb.to_f32(), wh.to_f32()), "{} {:e}", ops.name(), src[i]);
                }
            }
        }
    }
}

#[test]
fn sums_touch_their_row_only_and_round_once() {
    let mut rng = Rng::new(2);
    for ops in all_ops() {
        for len in LENGTHS {
            let mut row = || (0..len).map(|_| rng.unit()).collect::<Vec<f32>>();
            let (t, base, third) = (row(), row(), row());
            let mut y = base.clone();
            ops.axpy(0.75, &t, &mut y);
            assert!(y.iter().zip(&base).zip(&t).all(|((y, b), t)| (y - (b + 0.75 * t)).abs() < 1e-6));
            ops.add(&t, &mut y);
            ops.scale(-2.0, &mut y);
            assert!(y.iter().zip(&base).zip(&t).all(|((y, b), t)| (y + 2.0 * (b + 1.75 * t)).abs() < 2e-6));
            let (mut f, mut b, mut h) = (vec![9f32; len], vec![9u16; len], vec![9u16; len]);
            let parts: [&[f32]; 3] = [&t, &base, &third];
            ops.reduce(&parts, OutRow::F32(&mut f));
            ops.reduce(&parts, OutRow::Bf16(&mut b));
            ops.reduce(&parts, OutRow::F16(&mut h));
            for i in 0..len {
                let sum = t[i] + base[i] + third[i];
                assert_eq!(f[i], sum);
                assert_eq!((b[i], h[i]), (bf16::from_f32(sum).to_bits(), f16::from_f32(sum).to_bits()));
            }
            ops.reduce(&[], OutRow::F32(&mut f));
            assert!(f.iter().all(|&x| x == 0.0));
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// erfc by its series or continued fraction, to about 1e-15.
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.5 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
            if n > 200.0 {
                break;
            }
        }
        return 1.0 - 2.0 / std::f64::consts::PI.sqrt() * sum;
    }
    let mut fraction = 0.0;
    for i in (1..120).rev() {
        fraction = f64::from(i) / 2.0 / (x + fraction);
    }
    (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
}

fn exact(f: ActivationFn, g: f64, u: f64) -> f64 {
    let clamp = |x: f64, l: f32| x.clamp(-f64::from(l), f64::from(l));
    match f {
        ActivationFn::Silu { limit } => {
            let g = g.min(f64::from(limit));
            g * sigmoid(g) * clamp(u, limit)
        }
        ActivationFn::SwigluStep { limit } => (g * sigmoid(g)).min(f64::from(limit)) * clamp(u, limit),
        ActivationFn::SwigluOai { alpha, limit, beta } => {
            let g = g.min(f64::from(limit));
            g * sigmoid(f64::from(alpha) * g) * (clamp(u, limit) + f64::from(beta))
        }
        ActivationFn::Gelu => g * 0.5 * erfc(-g / 2f64.sqrt()) * u,
        ActivationFn::GeluTanh => {
            let y = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g);
            // tanh would cancel where the value is small.
            g * sigmoid(2.0 * y) * u
        }
        ActivationFn::Relu2 => g.max(0.0).powi(2) * u,
        ActivationFn::Situ { beta, linear_beta } => {
            let (b, l) = (f64::from(beta), f64::from(linear_beta));
            b * (g / b).tanh() * sigmoid(g) * l * (u / l).tanh()
        }
    }
}

fn activations() -> Vec<Activation> {
    let limit = ActivationParams { limit: Some(3.0), ..Default::default() };
    [
        "silu",
        "gelu",
        "gelu_tanh",
        "swigluoai",
        "swiglustep",
        "relu2",
        "situ",
        "silu_no_mul",
        "gelu_no_mul",
        "relu2_no_mul",
    ]
    .into_iter()
    .map(|n| Activation::parse(n, ActivationParams::default()).unwrap())
    .chain(["silu", "swigluoai", "swiglustep"].into_iter().map(|n| Activation::parse(n, limit).unwrap()))
    .collect()
}

#[test]
fn activations_agree_with_f64() {
    let mut rng = Rng::new(3);
    for ops in all_ops() {
        for act in activations() {
            let mut gate: Vec<f32> = (0..4000).map(|i| (i as f32 - 2000.0) / 100.0).collect();
            gate.extend((0..4000).map(|_| rng.unit() * (rng.unit() * 12.0).exp2()));
            gate.extend([0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 80.0, -80.0, 3.0, -3.0]);
            let up: Vec<f32> = gate.iter().map(|_| rng.unit() * 8.0).collect();
            let mut out = vec![0f32; gate.len()];
            ops.activate(&act, &gate, &up, &mut out);
            for i in 0..gate.len() {
                let u = if act.gated { f64::from(up[i]) } else { 1.0 };
                let want = exact(act.function, f64::from(gate[i]), u);
                // The exponential's argument is rounded to f32: its error grows with the argument. Below the
                // smallest value of interest only the magnitude counts.
                let g = f64::from(gate[i]).abs();
                let ulps = match act.function {
                    ActivationFn::Gelu => 12.0 + g * g,
                    ActivationFn::GeluTanh => 8.0 + 8.0 * (g + 0.045 * g.powi(3)),
                    _ => 8.0 + 2.0 * g,
                };
                let error = (f64::from(out[i]) - want).abs();
                let bound = ulps * 6e-8 * want.abs() + 1e-30;
                assert!(error <= bound, "{} {act:?} g={} u={u}: {} not {want}", ops.name(), gate[i], out[i]);
            }
        }
    }
}

#[test]
fn nan_survives_every_activation_in_either_operand() {
    for ops in all_ops() {
        for act in activations() {
            for len in [1, 16, 33] {
                let mut out = vec![0f32; len];
                ops.activate(&act, &vec![f32::NAN; len], &vec![1.0; len], &mut out);
                assert!(out.iter().all(|x| x.is_nan()), "{} {act:?} gate", ops.name());
                ops.activate(&act, &vec![1.0; len], &vec![f32::NAN; len], &mut out);
                assert!(!act.gated || out.iter().all(|x| x.is_nan()), "{} {act:?} up", ops.name());
            }
        }
    }
}

#[test]
fn unknown_names_and_impossible_parameters_are_refused() {
    assert!(Activation::parse("mish", ActivationParams::default()).is_err());
    let zero = ActivationParams { limit: Some(0.0), ..Default::default() };
    assert!(Activation::parse("silu", zero).err().unwrap().to_string().contains("limit"));
    let nan = ActivationParams { beta: Some(f32::NAN), ..Default::default() };
    assert!(Activation::parse("situ", nan).is_err());
    assert!(!Activation::parse("relu2_no_mul", ActivationParams::default()).unwrap().gated);
}
