//! Reading the machine through hwloc; the only file that names hwlocality.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::TopologyBuilder;

use super::assemble::{RawMachine, RawNode};
use super::cgroup::cpu_quota;
use super::cpulist::{format_cpu_list, parse_cpu_list};
use super::sysfs::{distances, kernel_nodes};
use super::types::{CpuId, NodeId, Topology};
use crate::error::{Error, Result};

impl Topology {
    /// The part of this machine that the process may use: CPUs of its cpuset that are also in `allowed`.
    ///
    /// `allowed` is the affinity mask that the user started the server with. The mask of the *calling thread* is
    /// never looked at, since inference servers bind that thread to a few cores for their own use. Without
    /// `allowed` the mask of the process's main thread is used (`Cpus_allowed_list` of `/proc/self/status`).
    ///
    /// Degrades rather than fails: what can't be read becomes one node, unknown memory or equal cores, and a
    /// line in [`Topology::notes`].
    ///
    /// # Errors
    /// [`Error::Topology`] when no CPU is left.
    pub fn detect(allowed: Option<&[CpuId]>) -> Result<Self> {
        let main_thread = main_thread_mask();
        let allowed = allowed.or(main_thread.as_deref());
        let raw = match load_hwloc() {
            Ok(hwloc) => {
                let mut raw = raw_machine(&hwloc);
                if !hwloc.is_this_system() {
                    raw.notes.push(
                        "An HWLOC_* variable makes hwloc describe another machine; unset it unless this is a test."
                            .to_owned(),
                    );
                }
                raw
            }
            Err(why) => flat_machine(allowed, &why),
        };
        complete(raw, Path::new("/"), allowed)
    }

    /// A machine from hwloc's synthetic description, such as `pack:2 [numa] core:18 pu:2`; all CPUs allowed.
    ///
    /// # Errors
    /// [`Error::Topology`] if hwloc doesn't accept the description.
    pub fn from_synthetic(description: &str) -> Result<Self> {
        Self::synthetic(description, None)
    }

    /// As [`Topology::from_synthetic`], of which this process may use only the CPUs in `allowed`.
    ///
    /// # Errors
    /// [`Error::Topology`] if hwloc doesn't accept the description, or no CPU is left.
    pub fn from_synthetic_restricted(description: &str, allowed: &[CpuId]) -> Result<Self> {
        Self::synthetic(description, Some(allowed))
    }

    fn synthetic(description: &str, allowed: Option<&[CpuId]>) -> Result<Self> {
        let hwloc = (TopologyBuilder::new().from_synthetic(description).map_err(|e| e.to_string()))
            .and_then(|builder| builder.build().map_err(|e| e.to_string()))
            .map_err(|e| Error::Topology(format!("synthetic description {description:?}: {e}")))?;
        let raw = raw_machine(&hwloc);
        let allowed = match allowed {
            Some(cpus) => cpus.iter().copied().collect(),
            None => raw.cores.iter().flatten().copied().collect(),
        };
        raw.assemble(&allowed)
    }
}

/// Adds what `proc` and `sys` below `root` tell, and applies the allowance.
fn complete(mut raw: RawMachine, root: &Path, allowed: Option<&[CpuId]>) -> Result<Topology> {
    let sysfs_root = root.join("sys");
    match kernel_nodes(&sysfs_root) {
        Some(nodes) => {
            raw.distances = distances(&sysfs_root, &nodes.keys().copied().collect::<Vec<_>>());
            raw.kernel_cpus = nodes;
        }
        None => raw.notes.push(
            "The kernel shows no NUMA nodes (no NUMA support, or a flat virtual machine); all memory counts as one node."
                .to_owned(),
        ),
    }
    let allowed: BTreeSet<CpuId> = if let Some(cpus) = allowed {
        cpus.iter().copied().collect()
    } else {
        raw.notes.push("The process's affinity mask can't be read; all CPUs of its cpuset count.".to_owned());
        raw.cores.iter().flatten().copied().collect()
    };
    let mut topology = raw.assemble(&allowed)?;
    topology.set_capacities(&sysfs_root);
    topology.quota_cpus = cpu_quota(root);
    Ok(topology)
}

/// The running machine as hwloc sees it, without its x86 component: that one moves the calling thread from CPU
/// to CPU to run CPUID, for facts (cache details) that aren't needed here.
fn load_hwloc() -> std::result::Result<Hwloc, String> {
    let builder = TopologyBuilder::new();
    let builder = builder.without_component("x86").unwrap_or_else(|_| TopologyBuilder::new());
    builder.build().map_err(|e| e.to_string())
}

fn raw_machine(hwloc: &Hwloc) -> RawMachine {
    let mut raw = RawMachine::default();
    let cpus_of = |object: &TopologyObject| -> Vec<CpuId> {
        let Some(set) = object.cpuset() else { return Vec::new() };
        set.iter_set().map(|index| CpuId(usize::from(index) as u32)).collect()
    };
    for node in hwloc.objects_with_type(ObjectType::NUMANode) {
        let memory_bytes = match node.attributes() {
            Some(ObjectAttributes::NUMANode(attributes)) => attributes.local_memory().map_or(0, u64::from),
            _ => 0,
        };
        raw.nodes.push(RawNode {
            id: NodeId(node.os_index().unwrap_or(0) as u32),
            memory_bytes,
            cpus: cpus_of(node).into_iter().collect(),
        });
    }
    raw.cores = hwloc.objects_with_type(ObjectType::Core).map(cpus_of).collect();
    // Machines that don't tell cores from CPUs: every CPU that no core claims is a core.
    let claimed: BTreeSet<CpuId> = raw.cores.iter().flatten().copied().collect();
    let lone = hwloc
        .objects_with_type(ObjectType::PU)
        .map(cpus_of)
        .filter(|c| !c.iter().any(|c| claimed.contains(c)));
    raw.cores.extend(lone);
    raw
}

/// One node with one core per CPU, for machines on which hwloc fails.
fn flat_machine(mask: Option<&[CpuId]>, why: &str) -> RawMachine {
    let cores: Vec<Vec<CpuId>> = if let Some(cpus) = mask {
        cpus.iter().map(|&c| vec![c]).collect()
    } else {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        (0..count as u32).map(|c| vec![CpuId(c)]).collect()
    };
    let cpus = format_cpu_list(cores.iter().flatten().copied());
    let note =
        format!("hwloc can't read this machine ({why}); CPUs {cpus} count as one core each on one node.");
    RawMachine { cores, notes: vec![note], ..RawMachine::default() }
}

/// Affinity mask of the process's main thread, whichever thread asks: `/proc/self` is the thread group's leader.
fn main_thread_mask() -> Option<Vec<CpuId>> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    parse_cpu_list("Cpus_allowed_list", list).ok().filter(|cpus| !cpus.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(description: &str) -> RawMachine {
        raw_machine(&TopologyBuilder::new().from_synthetic(description).unwrap().build().unwrap())
    }

    #[test]
    fn a_kernel_without_nodes_is_one_node_with_one_note() {
        let topology =
            complete(raw("pack:1 core:4 pu:1"), Path::new("/nonexistent"), Some(&[CpuId(1), CpuId(2)]));
        let topology = topology.unwrap();
        assert_eq!(topology.nodes.len(), 1);
        assert_eq!(topology.nodes[0].cores.len(), 2);
        assert_eq!(topology.notes.len(), 1, "{:?}", topology.notes);
        assert!(topology.notes[0].contains("no NUMA nodes"));
    }

    #[test]
    fn an_unreadable_mask_is_noted() {
        let topology = complete(raw("pack:1 core:4 pu:1"), Path::new("/nonexistent"), None).unwrap();
        assert_eq!(topology.nodes[0].cores.len(), 4);
        assert!(topology.notes.iter().any(|n| n.contains("affinity mask")), "{:?}", topology.notes);
    }

    #[test]
    fn machines_without_core_objects_have_one_core_per_cpu() {
        let topology = complete(raw("pack:2 pu:3"), Path::new("/nonexistent"), None).unwrap();
        assert_eq!(topology.nodes[0].cores.len(), 6);
    }

    #[test]
    fn a_machine_that_hwloc_cannot_read_is_flat() {
        let topology = complete(
            flat_machine(Some(&[CpuId(3), CpuId(5)]), "broken"),
            Path::new("/nonexistent"),
            Some(&[CpuId(3), CpuId(5)]),
        )
        .unwrap();
        assert_eq!(topology.nodes[0].cores.len(), 2);
        assert!(
            topology.notes[0].contains("(broken); CPUs 3,5 count as one core each"),
            "{:?}",
            topology.notes
        );
    }

    #[test]
    fn the_main_thread_s_mask_can_be_read_here() {
        assert!(!main_thread_mask().unwrap().is_empty());
    }
}
