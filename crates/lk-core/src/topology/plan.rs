//! Placing workers: a pure function of the topology and of what the user and the server ask for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use super::cpulist::{format_cpu_list, format_node_list};
use super::deal::{Share, deal};
use super::types::{CpuId, NodeId, NodePlan, NumaNode, Topology, WorkerPlan, WorkerSlot};
use crate::error::{Error, Result};

/// How a worker thread is bound (`LK_THREAD_BINDING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Binding {
    /// One worker, one CPU (`CPU_CORE`).
    #[default]
    CpuCore,
    /// Workers may move among the process's CPUs of their node (`NUMA_NODE`).
    NumaNode,
}

/// What is asked of [`plan_workers`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRequest {
    /// Workers of this process (`LK_THREADS`); `None`: all its physical cores less the reserved ones.
    pub threads: Option<usize>,
    /// How workers are bound.
    pub binding: Binding,
    /// Nodes that this server may use (`LVLLM_NUMA_NODES`); `None`: all.
    pub nodes: Option<Vec<NodeId>>,
    /// Tensor-parallel rank of this process, below `world`.
    pub rank: usize,
    /// Number of ranks on this machine.
    pub world: usize,
    /// Node of this process's GPU, if there is one and its node is known: decides which of the rank's nodes comes
    /// first and leaves the reserved core. It doesn't change which cores belong to which rank, since the
    /// other ranks don't know it.
    pub gpu_node: Option<NodeId>,
    /// Nodes of the GPUs of all ranks, by rank, identical in all ranks; empty when unknown. Ranks then get the
    /// nodes nearest to their GPUs.
    pub gpu_nodes: Vec<Option<NodeId>>,
    /// Physical cores, over all ranks together, to leave to the server's own threads: 0 on the CPU platform,
    /// `world` with GPUs.
    pub reserve_cores: usize,
}

impl Default for PlanRequest {
    fn default() -> Self {
        Self {
            threads: None,
            binding: Binding::default(),
            nodes: None,
            rank: 0,
            world: 1,
            gpu_node: None,
            gpu_nodes: Vec::new(),
            reserve_cores: 0,
        }
    }
}

impl PlanRequest {
    pub(super) fn own_gpu_node(&self) -> Option<NodeId> {
        self.gpu_node.or_else(|| self.gpu_nodes.get(self.rank).copied().flatten())
    }
}

/// Decides which workers this rank runs and where.
///
/// Nodes are dealt to ranks as contiguous blocks, nearest to their GPUs; with more ranks than nodes the cores
/// of a node are split. Workers take physical cores of all the rank's nodes evenly before any SMT sibling, fast
/// kinds of cores before slow ones, reserved cores last. By default there is one worker per unreserved physical
/// core, at most as many as a CFS quota feeds. An explicit number is honoured up to the rank's logical
/// CPUs.
///
/// # Errors
/// [`Error::Config`] for a node that isn't there or has no CPUs and for zero threads; [`Error::Argument`]
/// for a rank outside the world.
pub fn plan_workers(topology: &Topology, request: &PlanRequest) -> Result<WorkerPlan> {
    if request.world == 0 || request.rank >= request.world {
        return Err(Error::Argument(format!(
            "rank {} is not below world size {}",
            request.rank, request.world
        )));
    }
    if request.threads == Some(0) {
        return Err(Error::Config(
            "LK_THREADS=0: at least one worker is needed; unset it for the default".to_owned(),
        ));
    }
    let mut notes = Vec::new();
    let nodes = select_nodes(topology, request)?;
    let shares = deal(&nodes, request, &mut notes);
    let reserved = reserve(&shares, request, &mut notes);
    let threads = num_threads(topology, request, &shares, reserved.len(), &mut notes);
    let picked = pick(&shares, &reserved, threads);
    let idle = shares.iter().zip(&picked).filter(|(_, cpus)| cpus.is_empty()).map(|(s, _)| s.node);
    let idle = format_node_list(idle);
    if !idle.is_empty() {
        notes.push(format!("{threads} workers leave nodes {idle} without any; they hold no weights."));
    }
    let nodes = shares
        .iter()
        .zip(picked)
        .filter(|(_, cpus)| !cpus.is_empty())
        .map(|(share, cpus)| NodePlan { node: share.node, workers: slots(share, cpus, request.binding) })
        .collect();
    Ok(WorkerPlan { nodes, notes })
}

/// Nodes with CPUs, of those that the user named.
fn select_nodes<'t>(topology: &'t Topology, request: &PlanRequest) -> Result<Vec<&'t NumaNode>> {
    let with_cpus: Vec<&NumaNode> = topology.nodes.iter().filter(|n| !n.cores.is_empty()).collect();
    let all = format_node_list(with_cpus.iter().map(|n| n.id));
    if with_cpus.is_empty() {
        return Err(Error::Topology("no node has a CPU that this process may use".to_owned()));
    }
    let Some(wanted) = &request.nodes else { return Ok(with_cpus) };
    let missing = wanted.iter().copied().find(|id| with_cpus.iter().all(|n| n.id != *id));
    if let Some(id) = missing {
        let why = if topology.nodes.iter().any(|n| n.id == id) {
            "has memory but no CPU that this process may use"
        } else {
            "is not a node that this process may use"
        };
        return Err(Error::Config(format!(
            "LVLLM_NUMA_NODES={}: node {} {why}; allowed: {all}",
            format_node_list(wanted.iter().copied()),
            id.0
        )));
    }
    if wanted.is_empty() {
        return Err(Error::Config(format!("LVLLM_NUMA_NODES is empty; allowed: {all}")));
    }
    Ok(with_cpus.into_iter().filter(|n| wanted.contains(&n.id)).collect())
}

/// Primary CPUs of the cores that this rank leaves to the server: the first core (fast, and where interrupts go)
/// of the node with the most, the GPU's before others. One core at least remains for workers.
fn reserve(shares: &[Share], request: &PlanRequest, notes: &mut Vec<String>) -> BTreeSet<CpuId> {
    let wanted = part(request.reserve_cores, request);
    let total: usize = shares.iter().map(|s| s.cores.len()).sum();
    let count = wanted.min(total.saturating_sub(1));
    if count < wanted {
        notes.push(format!(
            "No core can be left to the server's own threads: rank {} has {total} of them, {wanted} should stay free.",
            request.rank
        ));
    }
    let mut taken = vec![0; shares.len()];
    let mut reserved = BTreeSet::new();
    for _ in 0..count {
        let left = |i: usize| shares[i].cores.len() - taken[i];
        let Some(node) = (0..shares.len()).max_by_key(|&i| (left(i), Reverse(i))) else { break };
        reserved.insert(shares[node].cores[taken[node]].cpus[0]);
        taken[node] += 1;
    }
    reserved
}

/// This rank's part of something counted over all ranks.
fn part(total: usize, request: &PlanRequest) -> usize {
    total / request.world + usize::from(request.rank < total % request.world)
}

fn num_threads(
    topology: &Topology,
    request: &PlanRequest,
    shares: &[Share],
    reserved: usize,
    notes: &mut Vec<String>,
) -> usize {
    let cores: usize = shares.iter().map(|s| s.cores.len()).sum();
    let cpus: usize = shares.iter().flat_map(|s| &s.cores).map(|c| c.cpus.len()).sum();
    // Reserved cores are used by the same control group, so they eat of the same quota.
    let quota = topology
        .quota_cpus
        .map(|q| (q, part((q as usize).saturating_sub(request.reserve_cores), request).max(1)));
    let Some(asked) = request.threads else {
        let default = cores - reserved;
        return match quota {
            Some((quota, fed)) if fed < default => {
                notes.push(format!(
                    "A CFS quota of {quota:.1} CPUs limits rank {} to {fed} of {default} workers.",
                    request.rank
                ));
                fed
            }
            _ => default,
        };
    };
    let threads = asked.min(cpus);
    if asked > cpus {
        notes.push(format!(
            "LK_THREADS={asked} is more than the {cpus} CPUs ({cores} cores) of this process; {cpus} workers are started."
        ));
    } else if threads > cores {
        notes.push(format!(
            "LK_THREADS={asked} is more than the {cores} physical cores of this process; {} workers run on SMT siblings.",
            threads - cores
        ));
    }
    if let Some((quota, _)) = quota
        && (threads * request.world) as f64 > quota
    {
        notes.push(format!(
            "LK_THREADS={threads} in {} processes exceeds the CFS quota of {quota:.1} CPUs: the kernel will stop workers in the middle of a step.",
            request.world
        ));
    }
    threads
}

/// CPUs for `threads` workers by share. A tier is (SMT sibling, reserved, kind of core); within a tier the
/// node with the fewest workers is next.
fn pick(shares: &[Share], reserved: &BTreeSet<CpuId>, threads: usize) -> Vec<Vec<CpuId>> {
    let mut tiers: BTreeMap<(usize, bool, Reverse<u32>), Vec<VecDeque<CpuId>>> = BTreeMap::new();
    for (index, share) in shares.iter().enumerate() {
        for core in &share.cores {
            let keep_free = reserved.contains(&core.cpus[0]);
            for (sibling, &cpu) in core.cpus.iter().enumerate() {
                let tier = tiers
                    .entry((sibling, keep_free, Reverse(core.capacity)))
                    .or_insert_with(|| vec![VecDeque::new(); shares.len()]);
                tier[index].push_back(cpu);
            }
        }
    }
    let mut picked: Vec<Vec<CpuId>> = vec![Vec::new(); shares.len()];
    let mut left = threads;
    for mut tier in tiers.into_values() {
        while left > 0 {
            let candidates = (0..shares.len()).filter(|&i| !tier[i].is_empty());
            let Some(node) = candidates.min_by_key(|&i| (picked[i].len(), i)) else { break };
            picked[node].extend(tier[node].pop_front());
            left -= 1;
        }
    }
    picked
}

fn slots(share: &Share, cpus: Vec<CpuId>, binding: Binding) -> Vec<WorkerSlot> {
    match binding {
        Binding::CpuCore => cpus.into_iter().map(|cpu| WorkerSlot { cpus: vec![cpu] }).collect(),
        Binding::NumaNode => {
            let mut all: Vec<CpuId> = share.cores.iter().flat_map(|c| c.cpus.iter().copied()).collect();
            all.sort_unstable();
            vec![WorkerSlot { cpus: all }; cpus.len()]
        }
    }
}

/// One line per node: `node 0: 18 workers on CPUs 0-17`; with `NUMA_NODE` binding `... on any of CPUs 0-35`.
impl fmt::Display for WorkerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, node) in self.nodes.iter().enumerate() {
            let count = node.workers.len();
            let plural = if count == 1 { "" } else { "s" };
            let any = if node.workers.iter().any(|w| w.cpus.len() > 1) { "any of " } else { "" };
            let cpus = format_cpu_list(node.workers.iter().flat_map(|w| w.cpus.iter().copied()));
            let newline = if index == 0 { "" } else { "\n" };
            write!(f, "{newline}node {}: {count} worker{plural} on {any}CPUs {cpus}", node.node.0)?;
        }
        Ok(())
    }
}

/// One line per node: `node 0: 18 cores, CPUs 0-35, 93.1 GiB`, and the quota if there is one.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, node) in self.nodes.iter().enumerate() {
            let newline = if index == 0 { "" } else { "\n" };
            write!(f, "{newline}node {}: ", node.id.0)?;
            if node.cores.is_empty() {
                write!(f, "memory only")?;
            } else {
                let cpus = format_cpu_list(node.cores.iter().flat_map(|c| c.cpus.iter().copied()));
                write!(f, "{} cores, CPUs {cpus}", node.cores.len())?;
            }
            let mut kinds: Vec<(u32, usize)> = Vec::new();
            for kind in node.cores.chunk_by(|a, b| a.capacity == b.capacity) {
                kinds.push((kind[0].capacity, kind.len()));
            }
            if kinds.len() > 1 {
                let kinds: Vec<String> =
                    kinds.iter().map(|(capacity, count)| format!("{count} of capacity {capacity}")).collect();
                write!(f, " ({})", kinds.join(", "))?;
            }
            if node.memory_bytes > 0 {
                write!(f, ", {:.1} GiB", node.memory_bytes as f64 / (1u64 << 30) as f64)?;
            }
        }
        if let Some(quota) = self.quota_cpus {
            write!(f, "\nCFS quota: {quota:.1} CPUs")?;
        }
        Ok(())
    }
}
