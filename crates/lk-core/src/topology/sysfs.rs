//! What sysfs tells beyond hwloc: speed classes of cores, the kernel's CPU list per node, a GPU's node.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::assemble::FULL_CAPACITY;
use super::cpulist::{format_node_list, parse_cpu_list, parse_id_list};
use super::types::{CpuId, NodeId, Topology};

/// Two cores are of one kind when the slower reaches this share of the faster's rating. Favoured cores of one
/// kind differ by up to 9 % in their highest clock, efficient cores are at least 15 % below the fast ones.
const SAME_KIND: f64 = 0.9;

/// Reads the number in a one-line file.
pub(super) fn read_u64(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Nodes that the kernel has online, with its CPU list of each; `None` if it knows no nodes (no NUMA support).
pub(super) fn kernel_nodes(sysfs_root: &Path) -> Option<BTreeMap<NodeId, Vec<CpuId>>> {
    let base = sysfs_root.join("devices/system/node");
    let online = parse_id_list("online nodes", &fs::read_to_string(base.join("online")).ok()?).ok()?;
    let cpus_of = |id: u32| {
        let text = fs::read_to_string(base.join(format!("node{id}/cpulist"))).ok()?;
        parse_cpu_list("cpulist", &text).ok()
    };
    let nodes: BTreeMap<_, _> =
        online.into_iter().map(|id| (NodeId(id), cpus_of(id).unwrap_or_default())).collect();
    (!nodes.is_empty()).then_some(nodes)
}

/// The firmware's distance table; empty where it can't be read.
pub(super) fn distances(sysfs_root: &Path, nodes: &[NodeId]) -> BTreeMap<(NodeId, NodeId), u32> {
    let mut table = BTreeMap::new();
    for &from in nodes {
        let path = sysfs_root.join(format!("devices/system/node/node{}/distance", from.0));
        let Ok(text) = fs::read_to_string(path) else { continue };
        // One column per online node, in ascending order of number.
        for (&to, value) in nodes.iter().zip(text.split_whitespace()) {
            if let Ok(distance) = value.parse() {
                table.insert((from, to), distance);
            }
        }
    }
    table
}

impl Topology {
    /// Sets every core's capacity from sysfs and orders the cores of each node by it, fastest kind first.
    ///
    /// Sources, the first that distinguishes any two cores: `cpu_capacity`, `cpufreq/cpuinfo_max_freq`,
    /// `acpi_cppc/highest_perf` below `sysfs_root/devices/system/cpu/cpuN`. Ratings within 10 % are one kind.
    /// Where no source tells cores apart all keep the same capacity. Kernels without the `core_type` files and
    /// machines that number fast and slow cores alternately are covered.
    pub fn set_capacities(&mut self, sysfs_root: &Path) {
        let base = sysfs_root.join("devices/system/cpu");
        for file in ["cpu_capacity", "cpufreq/cpuinfo_max_freq", "acpi_cppc/highest_perf"] {
            let rating = |cpu: &CpuId| read_u64(&base.join(format!("cpu{}/{file}", cpu.0)));
            let ratings: Option<Vec<Vec<u64>>> = (self.nodes.iter())
                .map(|n| n.cores.iter().map(|c| c.cpus.iter().filter_map(rating).max()).collect())
                .collect();
            // A source that rates only some of the cores can't be compared.
            let Some(ratings) = ratings else { continue };
            let kinds = kinds(ratings.iter().flatten().copied());
            if kinds.len() < 2 {
                continue;
            }
            for (node, ratings) in self.nodes.iter_mut().zip(&ratings) {
                for (core, rating) in node.cores.iter_mut().zip(ratings) {
                    core.capacity = capacity(&kinds, *rating);
                }
                node.cores.sort_by_key(|c| (std::cmp::Reverse(c.capacity), c.cpus[0]));
            }
            return;
        }
    }
}

/// Highest rating of each kind, descending.
fn kinds(ratings: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut sorted: Vec<u64> = ratings.filter(|&r| r > 0).collect();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut leaders: Vec<u64> = Vec::new();
    for rating in sorted {
        if leaders.last().is_none_or(|&leader| (rating as f64) < SAME_KIND * leader as f64) {
            leaders.push(rating);
        }
    }
    leaders
}

/// Capacity of a core by its kind's leader, the fastest kind being [`FULL_CAPACITY`].
fn capacity(kinds: &[u64], rating: u64) -> u32 {
    let leader = kinds.iter().copied().filter(|&k| k >= rating).min().unwrap_or(kinds[0]);
    ((leader as f64 / kinds[0] as f64 * f64::from(FULL_CAPACITY)).round() as u32).max(1)
}

/// The NUMA node of a GPU, from `sysfs_root/bus/pci/devices/<id>/numa_node`, and a line for the log when
/// the machine doesn't tell.
///
/// `pci_bus_id` in any of the usual spellings (`0000:3b:00.0`, `00000000:3B:00.0`, `3B:00.0`, `3B:00`). Firmware
/// without the information says -1, some hypervisors have no such file, and a node may be outside this process's
/// allowance. Then the machine's only node with workers is taken, or none is preferred where there are several.
pub fn gpu_node(
    pci_bus_id: &str,
    sysfs_root: &Path,
    topology: &Topology,
) -> (Option<NodeId>, Option<String>) {
    let address = pci_address(pci_bus_id);
    let path = sysfs_root.join("bus/pci/devices").join(&address).join("numa_node");
    let text = fs::read_to_string(&path).ok();
    let why = match text.as_deref().map(str::trim) {
        None => "the system doesn't say".to_owned(),
        Some("") => "the system's answer is empty".to_owned(),
        Some(answer) => match answer.parse::<i64>() {
            Ok(id) if topology.nodes.iter().any(|n| i64::from(n.id.0) == id) => {
                return (Some(NodeId(id as u32)), None);
            }
            Ok(id) if id < 0 => format!("the system says {id}"),
            Ok(id) => format!("the system says node {id}, which this process can't use"),
            Err(_) => format!("the system's answer {answer:?} is not a number"),
        },
    };
    let workers: Vec<NodeId> = topology.nodes.iter().filter(|n| !n.cores.is_empty()).map(|n| n.id).collect();
    let (node, consequence) = match workers[..] {
        [only] => (Some(only), format!("node {} is taken", only.0)),
        _ => (None, format!("no node among {} is preferred", format_node_list(workers))),
    };
    (node, Some(format!("NUMA node of the GPU at {address}: {why}; {consequence}.")))
}

/// sysfs spelling of a PCI address: lower case, four-digit domain, with function.
fn pci_address(pci_bus_id: &str) -> String {
    let id = pci_bus_id.trim().to_ascii_lowercase();
    let (domain, rest) = match id.split(':').count() {
        3 => id.split_once(':').unwrap_or(("0", &id)),
        _ => ("0", id.as_str()),
    };
    let domain = u32::from_str_radix(domain, 16).unwrap_or(0);
    let function = if rest.contains('.') { "" } else { ".0" };
    format!("{domain:04x}:{rest}{function}")
}
