//! Plain data that describes a machine and the placement of workers on it; no hwloc types.

/// Operating-system number of a logical CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u32);

/// Operating-system number of a NUMA node; numbers may have holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// One physical core: its allowed logical CPUs, primary first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Core {
    /// Allowed logical CPUs (SMT siblings) in ascending order; never empty.
    pub cpus: Vec<CpuId>,
    /// Relative speed, larger is faster; equal on machines with one kind of core.
    pub capacity: u32,
}

/// One NUMA node with at least one allowed CPU (or, without CPUs, memory only).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: NodeId,
    /// Memory in bytes, 0 when unknown.
    pub memory_bytes: u64,
    /// Allowed cores, fastest kind first, then by number; empty for memory-only nodes.
    pub cores: Vec<Core>,
}

/// The part of the machine that this process may use.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    /// Nodes in ascending order of number.
    pub nodes: Vec<NumaNode>,
    /// CPUs' worth of time that a CFS quota grants, if there is one.
    pub quota_cpus: Option<f64>,
    /// Lines for the log: what was missing, guessed or refused while reading.
    pub notes: Vec<String>,
}

/// Where one worker thread runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSlot {
    /// CPUs that the thread is bound to: one for `CPU_CORE`, all of the node's for `NUMA_NODE`.
    pub cpus: Vec<CpuId>,
}

/// The workers of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// The node.
    pub node: NodeId,
    /// Its workers, never empty.
    pub workers: Vec<WorkerSlot>,
}

/// The workers of one process (one tensor-parallel rank), by node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerPlan {
    /// Nodes in the order in which slices of `intermediate_size` are dealt.
    pub nodes: Vec<NodePlan>,
    /// Clamps, fall-backs and other facts that the user should read once.
    pub notes: Vec<String>,
}

impl WorkerPlan {
    /// Number of workers over all nodes.
    pub fn num_workers(&self) -> usize {
        self.nodes.iter().map(|n| n.workers.len()).sum()
    }
}
