//! What the machine looks like to this process, and which worker runs where.

mod assemble;
mod cgroup;
mod cpulist;
mod deal;
mod detect;
mod plan;
mod sysfs;
mod types;

pub use cgroup::{MemoryLimits, NodeMemory, cpu_quota, memory_limits};
pub use cpulist::{
    format_cpu_list, format_id_list, format_node_list, parse_cpu_list, parse_id_list, parse_node_list,
};
pub use plan::{Binding, PlanRequest, plan_workers};
pub use sysfs::gpu_node;
pub use types::{Core, CpuId, NodeId, NodePlan, NumaNode, Topology, WorkerPlan, WorkerSlot};
