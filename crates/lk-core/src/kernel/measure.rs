//! The choice of kernels by timing them, a few milliseconds per format and shape.

use super::select::KernelSet;
use super::{Kernel, Operand, Rows};
use crate::tile::{NR, TileLayout};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Row counts that are timed; each stands for the counts down to its predecessor.
const TIMED_ROWS: [usize; 6] = [1, 2, 4, 8, 16, 64];

/// Weights that are walked over: they stay in the second-level cache. From memory all kernels that keep up with the bus look
/// alike; the one with the highest rate from the cache has the most slack when many cores share the bus.
const WALK_BYTES: usize = 512 << 10;

/// Length of one timing, of which there are [`TRIES`].
const TRIAL: Duration = Duration::from_micros(400);
const TRIES: usize = 3;

impl KernelSet {
    /// Times every candidate on a matrix of `n` × `k` and takes the fastest for each row count. A rival must be faster by
    /// more than 3 % to displace an earlier candidate, so that equal kernels do not alternate from start to start.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the format cannot have this shape, [`Error::OutOfMemory`] if the scratch of some megabytes cannot
    /// be had.
    pub fn measure(&mut self, n: usize, k: usize) -> Result<()> {
        if self.kernels().len() < 2 {
            return Ok(());
        }
        let format = self.kernels()[0].format();
        let layout = if format.act_order {
            TileLayout::act_order(format, n, k, k.div_ceil(128).max(1))?
        } else {
            TileLayout::new(format, n, k)?
        };
        let panels = (WALK_BYTES / layout.panel_bytes()).clamp(2, 4096);
        let bytes = panels * layout.panel_bytes();
        let mut weights = Vec::new();
        weights.try_reserve_exact(bytes).map_err(|e| Error::OutOfMemory {
            node: 0,
            bytes,
            detail: format!("{e}; set LVLLM_KERNEL to choose a kernel without measuring"),
        })?;
        // A number of ordinary size in every code and scale; groups that are looked up are group 0.
        weights.resize(bytes, 0x3c);
        if format.act_order {
            for panel in weights.chunks_exact_mut(layout.panel_bytes()) {
                panel[layout.index_offset()..][..2 * layout.k_padded()].fill(0);
            }
        }
        let rows = TIMED_ROWS[TIMED_ROWS.len() - 1];
        let x_f32 = vec![0.5f32; rows * layout.k_padded()];
        let x_bf16 = vec![0x3f00u16; rows * layout.k_padded()];
        let mut out = vec![0f32; rows * NR];
        let mut smaller = 0;
        for m in TIMED_ROWS {
            let mut best = (0, Duration::MAX);
            for (i, kernel) in self.kernels().iter().enumerate() {
                let x = match kernel.operand() {
                    Operand::F32 => Rows::f32(&x_f32, layout.k_padded(), layout.k_padded()),
                    Operand::Bf16 => Rows::bf16(&x_bf16, layout.k_padded(), layout.k_padded()),
                };
                let time = time_panel(kernel, &layout, &weights, &x.range(0, m), &mut out);
                if time.mul_f64(1.03) < best.1 {
                    best = (i, time);
                }
            }
            self.choose(smaller + 1..=m, best.0);
            smaller = m;
        }
        self.choose(smaller + 1..=usize::MAX, self.choice(smaller));
        Ok(())
    }
}

/// Shortest mean time of a panel over a few short trials.
fn time_panel(
    kernel: &Kernel,
    layout: &TileLayout,
    weights: &[u8],
    x: &Rows<'_>,
    out: &mut [f32],
) -> Duration {
    let mut panels = weights.chunks_exact(layout.panel_bytes()).cycle();
    let mut best = Duration::MAX;
    for _ in 0..TRIES {
        let start = Instant::now();
        let mut count = 0;
        while count < 2 || start.elapsed() < TRIAL {
            if let Some(panel) = panels.next() {
                kernel.run(panel, layout, x, out);
            }
            count += 1;
        }
        best = best.min(start.elapsed() / count);
    }
    best
}
