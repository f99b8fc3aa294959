//! From raw facts about a machine to the part of it that this process may use. Pure: reads nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::cpulist::{format_cpu_list, format_node_list};
use super::types::{Core, CpuId, NodeId, NumaNode, Topology};
use crate::error::{Error, Result};

/// Capacity of a core whose speed is unknown, and of the fastest kind (the kernel's own scale).
pub(super) const FULL_CAPACITY: u32 = 1024;

/// What was found out about the machine before any allowance is applied.
#[derive(Debug, Default)]
pub(super) struct RawMachine {
    /// Nodes with memory, in any order.
    pub nodes: Vec<RawNode>,
    /// Logical CPUs of each physical core.
    pub cores: Vec<Vec<CpuId>>,
    /// The kernel's own CPU list per node; empty when the source isn't a running kernel.
    pub kernel_cpus: BTreeMap<NodeId, Vec<CpuId>>,
    /// Distances between nodes by the firmware's table; may be empty.
    pub distances: BTreeMap<(NodeId, NodeId), u32>,
    /// Lines for the log gathered on the way.
    pub notes: Vec<String>,
}

/// One node as the source describes it.
#[derive(Debug)]
pub(super) struct RawNode {
    pub id: NodeId,
    pub memory_bytes: u64,
    /// CPUs near this node; for a memory-only node these are the CPUs of a neighbour or of all nodes.
    pub cpus: BTreeSet<CpuId>,
}

impl RawMachine {
    /// The node that a CPU belongs to. The kernel's list decides; without it the node with the fewest CPUs
    /// around it, then the lowest number: HBM and CXL nodes report the CPUs of the nodes that they serve and
    /// are numbered after those.
    fn node_of(&self, cpu: CpuId) -> Option<NodeId> {
        let by_kernel = self.kernel_cpus.iter().find(|(_, cpus)| cpus.contains(&cpu)).map(|(id, _)| *id);
        match by_kernel {
            Some(id) if self.nodes.iter().any(|n| n.id == id) => Some(id),
            Some(id) => self.nearest(id, |_| true),
            None => (self.nodes.iter().filter(|n| n.cpus.contains(&cpu)))
                .min_by_key(|n| (n.cpus.len(), n.id))
                .map(|n| n.id),
        }
    }

    /// The node nearest to `from` among those that `accept`; by distance table, then by number.
    fn nearest(&self, from: NodeId, accept: impl Fn(&RawNode) -> bool) -> Option<NodeId> {
        (self.nodes.iter().filter(|n| n.id != from && accept(n)))
            .min_by_key(|n| {
                let distance = self.distances.get(&(from, n.id)).copied().unwrap_or(u32::MAX);
                (distance, n.id.0.abs_diff(from.0), n.id)
            })
            .map(|n| n.id)
    }

    /// Applies the allowance: which cores of which node may be used.
    ///
    /// # Errors
    /// [`Error::Topology`] when no CPU is left.
    pub(super) fn assemble(mut self, allowed: &BTreeSet<CpuId>) -> Result<Topology> {
        let mut notes = std::mem::take(&mut self.notes);
        if self.nodes.is_empty() {
            let cpus = self.cores.iter().flatten().copied().collect();
            self.nodes.push(RawNode { id: NodeId(0), memory_bytes: 0, cpus });
        }
        let fallback = self.nodes.iter().map(|n| n.id).min().unwrap_or(NodeId(0));
        let mut by_node: BTreeMap<NodeId, Vec<Core>> = BTreeMap::new();
        let mut owners: BTreeSet<NodeId> = BTreeSet::new();
        let mut homeless = Vec::new();
        for core in &self.cores {
            let Some(&first) = core.first() else { continue };
            let home = self.node_of(first);
            let node = home.unwrap_or(fallback);
            owners.insert(node);
            let mut cpus: Vec<CpuId> = core.iter().copied().filter(|c| allowed.contains(c)).collect();
            cpus.sort_unstable();
            if cpus.is_empty() {
                continue;
            }
            if home.is_none() {
                homeless.extend(cpus.iter().copied());
            }
            by_node.entry(node).or_default().push(Core { cpus, capacity: FULL_CAPACITY });
        }
        if !homeless.is_empty() {
            notes.push(format!(
                "CPUs {} belong to no NUMA node whose memory this process may use; they work from node {}.",
                format_cpu_list(homeless),
                fallback.0
            ));
        }
        self.move_from_memoryless(&mut by_node, &mut owners, &mut notes);
        if by_node.is_empty() {
            return Err(Error::Topology(format!(
                "none of the machine's CPUs ({}) is among the allowed ones ({}); widen the process's affinity mask or cpuset",
                format_cpu_list(self.cores.iter().flatten().copied()),
                format_cpu_list(allowed.iter().copied())
            )));
        }
        self.nodes.sort_unstable_by_key(|n| n.id);
        let mut nodes = Vec::new();
        let mut closed = Vec::new();
        for raw in &self.nodes {
            let mut cores = by_node.remove(&raw.id).unwrap_or_default();
            if cores.is_empty() && owners.contains(&raw.id) {
                closed.push(raw.id);
                continue;
            }
            cores.sort_unstable_by_key(|c| c.cpus[0]);
            nodes.push(NumaNode { id: raw.id, memory_bytes: raw.memory_bytes, cores });
        }
        if !closed.is_empty() {
            notes.push(format!(
                "NUMA nodes {} are left out, because none of their CPUs is allowed to this process.",
                format_node_list(closed)
            ));
        }
        Ok(Topology { nodes, quota_cpus: None, notes })
    }

    /// Cores of a node without memory work from the nearest node that has some: a slice of the weights can't
    /// lie on the empty node.
    fn move_from_memoryless(
        &mut self,
        by_node: &mut BTreeMap<NodeId, Vec<Core>>,
        owners: &mut BTreeSet<NodeId>,
        notes: &mut Vec<String>,
    ) {
        if self.nodes.iter().all(|n| n.memory_bytes == 0) {
            return;
        }
        let empty: Vec<NodeId> = (self.nodes.iter())
            .filter(|n| n.memory_bytes == 0 && owners.contains(&n.id))
            .map(|n| n.id)
            .collect();
        for node in empty {
            let Some(target) = self.nearest(node, |n| n.memory_bytes > 0) else { continue };
            self.nodes.retain(|n| n.id != node);
            owners.remove(&node);
            owners.insert(target);
            let Some(cores) = by_node.remove(&node) else { continue };
            notes.push(format!(
                "NUMA node {} has no memory; its {} cores work from node {}, the nearest with memory.",
                node.0,
                cores.len(),
                target.0
            ));
            by_node.entry(target).or_default().extend(cores);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(nodes: &[(u32, u64, &[u32])], kernel: &[(u32, &[u32])]) -> RawMachine {
        let cpus = |ids: &[u32]| ids.iter().copied().map(CpuId).collect::<Vec<_>>();
        RawMachine {
            nodes: (nodes.iter())
                .map(|&(id, memory_bytes, ids)| RawNode {
                    id: NodeId(id),
                    memory_bytes,
                    cpus: cpus(ids).into_iter().collect(),
                })
                .collect(),
            cores: (0..8).map(|cpu| vec![CpuId(cpu)]).collect(),
            kernel_cpus: kernel.iter().map(|&(id, ids)| (NodeId(id), cpus(ids))).collect(),
            ..RawMachine::default()
        }
    }

    fn placed(topology: &Topology) -> Vec<(u32, Vec<u32>)> {
        let cpus = |n: &NumaNode| n.cores.iter().map(|c| c.cpus[0].0).collect();
        topology.nodes.iter().map(|n| (n.id.0, cpus(n))).collect()
    }

    fn all() -> BTreeSet<CpuId> {
        (0..8).map(CpuId).collect()
    }

    #[test]
    fn the_kernel_says_which_of_two_nodes_is_memory_only() {
        // By number node 0 would win; here it is the one without CPUs.
        let nodes: [(u32, u64, &[u32]); 2] =
            [(0, 1, &[0, 1, 2, 3, 4, 5, 6, 7]), (1, 1, &[0, 1, 2, 3, 4, 5, 6, 7])];
        let by_kernel =
            machine(&nodes, &[(0, &[]), (1, &[0, 1, 2, 3, 4, 5, 6, 7])]).assemble(&all()).unwrap();
        assert_eq!(placed(&by_kernel), [(0, vec![]), (1, vec![0, 1, 2, 3, 4, 5, 6, 7])]);
        let by_number = machine(&nodes, &[]).assemble(&all()).unwrap();
        assert_eq!(placed(&by_number), [(0, vec![0, 1, 2, 3, 4, 5, 6, 7]), (1, vec![])]);
    }

    #[test]
    fn cores_of_a_node_without_memory_work_from_the_nearest() {
        let nodes: [(u32, u64, &[u32]); 4] =
            [(0, 9, &[0, 1]), (1, 0, &[2, 3]), (2, 9, &[4, 5]), (3, 9, &[6, 7])];
        let mut raw = machine(&nodes, &[]);
        raw.distances = [((1, 0), 32), ((1, 2), 32), ((1, 3), 12)]
            .into_iter()
            .map(|((from, to), d)| ((NodeId(from), NodeId(to)), d))
            .collect();
        let topology = raw.assemble(&all()).unwrap();
        assert_eq!(placed(&topology), [(0, vec![0, 1]), (2, vec![4, 5]), (3, vec![2, 3, 6, 7])]);
        assert_eq!(topology.notes.len(), 1, "{:?}", topology.notes);
        assert!(topology.notes[0].contains("node 1 has no memory; its 2 cores work from node 3"));
    }

    #[test]
    fn cpus_of_a_node_outside_the_memory_allowance_work_from_the_nearest() {
        // cpuset.mems excludes node 1: hwloc doesn't show it, the kernel's CPU list does.
        let nodes: [(u32, u64, &[u32]); 2] = [(0, 9, &[0, 1, 2]), (4, 9, &[6, 7])];
        let raw = machine(&nodes, &[(0, &[0, 1, 2]), (1, &[3, 4, 5]), (4, &[6, 7])]);
        let topology = raw.assemble(&all()).unwrap();
        assert_eq!(placed(&topology), [(0, vec![0, 1, 2, 3, 4, 5]), (4, vec![6, 7])]);
    }

    #[test]
    fn no_nodes_at_all_are_one_node() {
        let topology = machine(&[], &[]).assemble(&all()).unwrap();
        assert_eq!(placed(&topology), [(0, (0..8).collect())]);
        assert!(machine(&[], &[]).assemble(&BTreeSet::new()).is_err());
    }
}
