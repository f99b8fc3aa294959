//! Where the weights really are: the one line that is printed after a load.

use std::collections::BTreeMap;
use std::fmt;

use super::bind::MemBinder;
use crate::topology::{NodeId, format_node_list};

/// Sampled pages that are on the node that they are meant for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalityReport {
    /// (pages on their node, pages sampled) by intended node; pages without memory behind them aren't counted.
    pub by_node: BTreeMap<NodeId, (usize, usize)>,
    /// Nodes of which the system doesn't tell.
    pub unknown: Vec<NodeId>,
}

/// Samples ranges of memory, each given with the node that it is meant for.
pub fn locality<'a>(
    binder: &dyn MemBinder,
    ranges: impl IntoIterator<Item = (NodeId, &'a [u8])>,
) -> LocalityReport {
    let mut report = LocalityReport::default();
    for (node, bytes) in ranges {
        let Some(counts) = binder.where_is(bytes.as_ptr(), bytes.len()) else {
            report.unknown.push(node);
            continue;
        };
        let (local, sampled) = report.by_node.entry(node).or_default();
        *local += counts.by_node.get(&node).copied().unwrap_or(0);
        *sampled += counts.by_node.values().sum::<usize>();
    }
    report.unknown.sort_unstable();
    report.unknown.dedup();
    report
}

impl LocalityReport {
    /// Share of the sampled pages that are local; `None` without a sample.
    pub fn local_share(&self) -> Option<f64> {
        let (local, sampled) =
            self.by_node.values().fold((0, 0), |(l, s), &(local, sampled)| (l + local, s + sampled));
        (sampled > 0).then(|| local as f64 / sampled as f64)
    }

    /// Whether at least 99 % of the sampled pages are local; `None` without a sample.
    pub fn is_local(&self) -> Option<bool> {
        self.local_share().map(|share| share >= 0.99)
    }
}

/// `99.8 % of 4096 sampled pages are on their own node (node 0: 2048/2048, node 1: 2040/2048)`.
impl fmt::Display for LocalityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local_share() {
            None => write!(f, "the system doesn't tell where pages are")?,
            Some(share) => {
                let sampled: usize = self.by_node.values().map(|&(_, sampled)| sampled).sum();
                // Rounded down, so that 99.96 % isn't printed as all.
                let percent = (share * 1000.0).floor() / 10.0;
                write!(f, "{percent:.1} % of {sampled} sampled pages are on their own node (")?;
                for (index, (node, (local, sampled))) in self.by_node.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}node {}: {local}/{sampled}", node.0)?;
                }
                write!(f, ")")?;
            }
        }
        if !self.unknown.is_empty() && !self.by_node.is_empty() {
            write!(f, "; unknown for nodes {}", format_node_list(self.unknown.iter().copied()))?;
        }
        Ok(())
    }
}
