//! What the machine looks like to this process, and which worker runs where.

mod types;

pub use types::{Core, CpuId, NodeId, NodePlan, NumaNode, Topology, WorkerPlan, WorkerSlot};
