//! The layer as its definition reads, in f64: the oracle of tests, benches and `lvllm verify`.

use crate::kernel::activation::Activation;

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
    pub fn forward(&self, hidden_states: &[f32], topk_ids: &[i32], topk_weights: &[f32], top_k: usize) -> Vec<f64> {
        let width = self.hidden_size;
        let mut out = vec![0.0; hidden_states.len()];
        for (t, x) in hidden_states.chunks_exact(width).enumerate() {
            for j in 0..top_k {
                let Ok(expert) = usize::try_from(topk_ids[t * top_k + j]) else { continue };
                let weight = f64::from(topk_weights[t * top_k + j]);
                let (on_input, on_output) = if self.router_weight_on_input { (weight, 1.0) } else { (1.0, weight) };
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
                let (gate, up) = match (self.activation.is_gated(), self.interleaved) {
                    (false, _) => return self.activation.reference(linear(w13, b13, i, &x), 0.0),
                    (true, false) => (i, rows + i),
                    (true, true) => (2 * i, 2 * i + 1),
                };
                self.activation.reference(linear(w13, b13, gate, &x), linear(w13, b13, up, &x))
            })
            .collect();
        (0..self.hidden_size).map(|n| linear(&self.w2[expert], self.w2_bias.get(expert), n, &h)).collect()
    }
}
