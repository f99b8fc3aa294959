//! The layer as its definition reads, in f64: the oracle of tests, benches and `lvllm verify`.

use crate::kernel::{Activation, ActivationFn};

/// Decoded experts of one layer, row-major.
#[derive(Debug, Clone)]
pub struct ReferenceLayer {
    /// Width that the experts see.
    pub hidden_size: usize,
    /// Width between w13 and w2.
    pub intermediate_size: usize,
    /// Activation with its parameters.
    pub activation: Activation,
    /// Whether gate and up rows alternate in `w13`.
    pub interleaved: bool,
    /// Whether the router weight multiplies the input.
    pub router_weight_on_input: bool,
    /// Per expert `[w13_shards · intermediate_size, hidden_size]`.
    pub w13: Vec<Vec<f32>>,
    /// Per expert `[hidden_size, intermediate_size]`.
    pub w2: Vec<Vec<f32>>,
    /// Per expert `[w13_shards · intermediate_size]`, or empty.
    pub w13_bias: Vec<Vec<f32>>,
    /// Per expert `[hidden_size]`, or empty.
    pub w2_bias: Vec<Vec<f32>>,
}

impl ReferenceLayer {
    /// Output `[T, hidden_size]` for `hidden_states` `[T, hidden_size]`, ids and weights `[T, top_k]`; ids of -1 are
    /// skipped.
    pub fn forward(
        &self,
        hidden_states: &[f32],
        topk_ids: &[i32],
        topk_weights: &[f32],
        top_k: usize,
    ) -> Vec<f64> {
        let width = self.hidden_size;
        let mut out = vec![0.0; hidden_states.len()];
        for (t, x) in hidden_states.chunks_exact(width).enumerate() {
            for j in 0..top_k {
                let Ok(expert) = usize::try_from(topk_ids[t * top_k + j]) else { continue };
                let weight = f64::from(topk_weights[t * top_k + j]);
                let (on_input, on_output) =
                    if self.router_weight_on_input { (weight, 1.0) } else { (1.0, weight) };
                let y = self.expert(expert, x, on_input);
                out[t * width..(t + 1) * width].iter_mut().zip(y).for_each(|(o, y)| *o += on_output * y);
            }
        }
        out
    }

    fn expert(&self, expert: usize, x: &[f32], scale: f64) -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|&v| f64::from(v) * scale).collect();
        let rows = self.intermediate_size;
        let linear = |w: &[f32], bias: Option<&Vec<f32>>, row: usize, x: &[f64]| -> f64 {
            let w = &w[row * x.len()..(row + 1) * x.len()];
            let dot: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * x).sum();
            dot + bias.map_or(0.0, |b| f64::from(b[row]))
        };
        let (w13, b13) = (&self.w13[expert], self.w13_bias.get(expert));
        let h: Vec<f64> = (0..rows)
            .map(|i| {
                let (gate, up) = match (self.activation.gated, self.interleaved) {
                    (false, _) => return activate(&self.activation, linear(w13, b13, i, &x), 0.0),
                    (true, false) => (i, rows + i),
                    (true, true) => (2 * i, 2 * i + 1),
                };
                activate(&self.activation, linear(w13, b13, gate, &x), linear(w13, b13, up, &x))
            })
            .collect();
        (0..self.hidden_size).map(|n| linear(&self.w2[expert], self.w2_bias.get(expert), n, &h)).collect()
    }
}

/// The activation of a gate and an up value; without an up matrix `u` counts as 1.
pub fn activate(activation: &Activation, g: f64, u: f64) -> f64 {
    let u = if activation.gated { u } else { 1.0 };
    let sigma = |v: f64| 1.0 / (1.0 + (-v).exp());
    let clamp = |v: f64, limit: f32| v.max(-f64::from(limit)).min(f64::from(limit));
    match activation.function {
        ActivationFn::Silu { limit } => {
            let (g, u) = (g.min(f64::from(limit)), clamp(u, limit));
            g * sigma(g) * u
        }
        ActivationFn::SwigluStep { limit } => (g * sigma(g)).min(f64::from(limit)) * clamp(u, limit),
        ActivationFn::SwigluOai { alpha, limit, beta } => {
            let (g, u) = (g.min(f64::from(limit)), clamp(u, limit));
            g * sigma(f64::from(alpha) * g) * (u + f64::from(beta))
        }
        ActivationFn::Gelu => 0.5 * g * (1.0 + erf(g / std::f64::consts::SQRT_2)) * u,
        ActivationFn::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            0.5 * g * (1.0 + inner.tanh()) * u
        }
        ActivationFn::Relu2 => g.max(0.0).powi(2) * u,
        ActivationFn::Situ { beta, linear_beta } => {
            let (beta, linear_beta) = (f64::from(beta), f64::from(linear_beta));
            beta * (g / beta).tanh() * sigma(g) * linear_beta * (u / linear_beta).tanh()
        }
    }
}

/// The error function: its Taylor series near zero, the continued fraction of erfc beyond (Abramowitz and Stegun 7.1.5,
/// 7.1.14).
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        2.0 / std::f64::consts::PI.sqrt() * sum
    } else {
        let fraction = (1..=60).rev().fold(a, |f, n| a + f64::from(n) / 2.0 / f);
        1.0 - (-a * a).exp() / (std::f64::consts::PI.sqrt() * fraction)
    };
    value.copysign(x)
}
