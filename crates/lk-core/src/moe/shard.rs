//! Which node holds which slice of `intermediate_size` of which expert.
//!
//! A node owns rows of w13 (gate and up alike) and the same columns of w2, so that a token's expert needs no
//! traffic between nodes until the partial sums of `hidden_size` meet once per layer.

use std::ops::Range;

/// Slices per expert fall on multiples of this many rows (one panel), or of the format's group along K of w2.
const PANEL: usize = 32;

/// Slices shorter than this many units make tasks too short to hand out; an expert then uses fewer nodes.
const MIN_UNITS: usize = 2;

/// The rule that cuts `intermediate_size` over nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardRule {
    intermediate_size: usize,
    unit: usize,
    nodes: usize,
    /// Number of nodes that one expert is spread over.
    spread: usize,
}

impl ShardRule {
    /// Cuts at multiples of 32 rows, and of `k_group` where the experts are long enough for every node to
    /// get whole groups (a scale that two slices share is stored by both otherwise).
    pub fn new(intermediate_size: usize, k_group: usize, nodes: usize) -> Self {
        let whole = k_group.max(1).next_multiple_of(PANEL);
        let unit = if intermediate_size.div_ceil(whole) >= nodes * MIN_UNITS { whole } else { PANEL };
        let units = intermediate_size.div_ceil(unit);
        let spread = (units / MIN_UNITS).clamp(1, nodes);
        Self { intermediate_size, unit, nodes, spread }
    }

    /// Rows of `intermediate_size` that `node` holds of `expert`; empty if it holds none.
    pub fn slice(&self, expert: usize, node: usize) -> Range<usize> {
        let units = self.intermediate_size.div_ceil(self.unit);
        // Experts that use fewer nodes than there are start on different nodes in turn.
        let first = if self.spread == self.nodes { 0 } else { expert * self.spread % self.nodes };
        let part = (node + self.nodes - first) % self.nodes;
        if part >= self.spread {
            return 0..0;
        }
        let at = |p: usize| (p * units / self.spread * self.unit).min(self.intermediate_size);
        at(part)..at(part + 1)
    }

    /// Whether `node` holds the first rows of `expert`; that node adds the bias of w2, once.
    pub fn owns_w2_bias(&self, expert: usize, node: usize) -> bool {
        let slice = self.slice(expert, node);
        slice.start == 0 && !slice.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(intermediate: usize, group: usize, nodes: usize) {
        let rule = ShardRule::new(intermediate, group, nodes);
        for expert in 0..=2 * nodes {
            let mut slices: Vec<_> =
                (0..nodes).map(|n| rule.slice(expert, n)).filter(|s| !s.is_empty()).collect();
            slices.sort_by_key(|s| s.start);
            assert_eq!(slices[0].start, 0);
            assert_eq!(slices.last().unwrap().end, intermediate);
            assert!(slices.windows(2).all(|w| w[0].end == w[1].start));
            assert!(slices.iter().all(|s| s.start.is_multiple_of(PANEL)));
            assert_eq!((0..nodes).filter(|&n| rule.owns_w2_bias(expert, n)).count(), 1);
        }
    }

    #[test]
    fn slices_partition_every_expert() {
        for intermediate in [16, 32, 48, 96, 128, 192, 640, 704, 768, 1344, 1536, 1856, 2880, 14336] {
            for group in [1, 16, 32, 128] {
                for nodes in [1, 2, 3, 4, 8, 16, 32] {
                    covers(intermediate, group, nodes);
                }
            }
        }
    }

    #[test]
    fn small_experts_rotate_over_nodes() {
        let rule = ShardRule::new(128, 1, 4);
        assert_eq!(rule.slice(0, 0), 0..64);
        assert_eq!(rule.slice(0, 2), 0..0);
        assert_eq!(rule.slice(1, 2), 0..64);
        let held = |n| (0..8).map(|e| rule.slice(e, n).len()).sum::<usize>();
        assert!((0..4).all(|n| held(n) == held(0)));
    }

    #[test]
    fn whole_groups_where_the_expert_is_long_enough() {
        let rule = ShardRule::new(2048, 128, 4);
        assert!((0..4).all(|n| rule.slice(0, n).start.is_multiple_of(128)));
        let rule = ShardRule::new(704, 128, 2);
        assert_eq!((rule.slice(0, 0), rule.slice(0, 1)), (0..384, 384..704));
    }
}
