//! Limits that control groups put on this process: CPU time and memory, versions 1 and 2.

use std::fs;
use std::path::{Path, PathBuf};

use super::sysfs::read_u64;
use super::types::NodeId;

/// Limits of version 1 at or above this are "none" (the kernel writes the largest multiple of a page).
const V1_UNLIMITED: u64 = 1 << 60;

/// CPUs' worth of time that CFS quotas grant to this process: the least over its control group and all groups
/// above it that are visible. `None` without a quota.
///
/// `root` is the file system's root (`/`; a directory in tests) below which `proc/self/cgroup`,
/// `proc/self/mountinfo` and the mounts named there are read.
pub fn cpu_quota(root: &Path) -> Option<f64> {
    let v2 = levels(root, Version::V2).into_iter().filter_map(|dir| quota_v2(&dir));
    let v1 = levels(root, Version::V1("cpu")).into_iter().filter_map(|dir| quota_v1(&dir));
    v2.chain(v1).min_by(f64::total_cmp)
}

/// `cpu.max`: `<quota or max> <period>`, microseconds.
fn quota_v2(dir: &Path) -> Option<f64> {
    let text = fs::read_to_string(dir.join("cpu.max")).ok()?;
    let mut words = text.split_whitespace();
    let quota: f64 = words.next()?.parse().ok()?;
    let period: f64 = words.next().and_then(|w| w.parse().ok()).unwrap_or(100_000.0);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

fn quota_v1(dir: &Path) -> Option<f64> {
    // -1 is "none" and doesn't parse as unsigned.
    let quota = read_u64(&dir.join("cpu.cfs_quota_us"))?;
    let period = read_u64(&dir.join("cpu.cfs_period_us"))?;
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// Host memory as it stood at the time of the call, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// `MemTotal`; 0 when unknown.
    pub total_bytes: u64,
    /// `MemAvailable`: free memory and what the kernel can give back without swapping; 0 when unknown.
    pub available_bytes: u64,
    /// Least room left in a control group on the way up: its limit less what is charged to it and can't be
    /// reclaimed (page cache can). `None` without a limit.
    pub cgroup_room_bytes: Option<u64>,
    /// The limit that gives `cgroup_room_bytes`.
    pub cgroup_limit_bytes: Option<u64>,
    /// Per node, ascending; empty on kernels without NUMA support.
    pub nodes: Vec<NodeMemory>,
}

/// Memory of one NUMA node, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMemory {
    /// The node.
    pub node: NodeId,
    /// Size.
    pub total_bytes: u64,
    /// Unused.
    pub free_bytes: u64,
    /// Page cache and slab that the kernel drops on demand.
    pub reclaimable_bytes: u64,
}

impl NodeMemory {
    /// What an allocation bound to this node can count on.
    pub fn usable_bytes(&self) -> u64 {
        self.free_bytes + self.reclaimable_bytes
    }
}

impl MemoryLimits {
    /// What this process can still allocate: the lesser of the machine's and the control group's room.
    pub fn usable_bytes(&self) -> u64 {
        self.cgroup_room_bytes.map_or(self.available_bytes, |room| room.min(self.available_bytes))
    }
}

/// Reads [`MemoryLimits`]; whatever can't be read stays unknown (0, `None` or empty). `root` as in [`cpu_quota`].
pub fn memory_limits(root: &Path) -> MemoryLimits {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total_bytes = kib_field(&meminfo, "MemTotal:");
    let available_bytes = if meminfo.contains("MemAvailable:") {
        kib_field(&meminfo, "MemAvailable:")
    } else {
        kib_field(&meminfo, "MemFree:") + kib_field(&meminfo, "Cached:")
    };
    let v2 = levels(root, Version::V2).into_iter().filter_map(|dir| memory_v2(&dir));
    let v1 = levels(root, Version::V1("memory")).into_iter().filter_map(|dir| memory_v1(&dir));
    let tightest = v2.chain(v1).min_by_key(|&(_, room)| room);
    MemoryLimits {
        total_bytes,
        available_bytes,
        cgroup_limit_bytes: tightest.map(|(limit, _)| limit),
        cgroup_room_bytes: tightest.map(|(_, room)| room),
        nodes: node_memory(root),
    }
}

/// (limit, room) of one group. Above `memory.high` the kernel throttles and reclaims, so it counts as a limit.
fn memory_v2(dir: &Path) -> Option<(u64, u64)> {
    let max = read_u64(&dir.join("memory.max"));
    let high = read_u64(&dir.join("memory.high"));
    let limit = max.into_iter().chain(high).min()?;
    let used = read_u64(&dir.join("memory.current")).unwrap_or(0);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    Some((limit, limit.saturating_sub(used.saturating_sub(file_cache(&stat, "")))))
}

fn memory_v1(dir: &Path) -> Option<(u64, u64)> {
    let limit = read_u64(&dir.join("memory.limit_in_bytes")).filter(|&l| l < V1_UNLIMITED)?;
    let used = read_u64(&dir.join("memory.usage_in_bytes")).unwrap_or(0);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    Some((limit, limit.saturating_sub(used.saturating_sub(file_cache(&stat, "total_")))))
}

/// Page cache in `memory.stat`: both lists of file pages.
fn file_cache(stat: &str, prefix: &str) -> u64 {
    let field = |name: &str| {
        let wanted = format!("{prefix}{name}");
        stat.lines()
            .filter_map(|line| line.split_once(' '))
            .find(|(key, _)| *key == wanted)
            .and_then(|(_, value)| value.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    field("active_file") + field("inactive_file")
}

fn node_memory(root: &Path) -> Vec<NodeMemory> {
    let base = root.join("sys/devices/system/node");
    let online = fs::read_to_string(base.join("online")).unwrap_or_default();
    let ids = super::cpulist::parse_id_list("online nodes", &online).unwrap_or_default();
    let read = |id: u32| {
        let text = fs::read_to_string(base.join(format!("node{id}/meminfo"))).ok()?;
        let field = |name: &str| kib_field(&text, name);
        Some(NodeMemory {
            node: NodeId(id),
            total_bytes: field("MemTotal:"),
            free_bytes: field("MemFree:"),
            reclaimable_bytes: field("Active(file):") + field("Inactive(file):") + field("SReclaimable:"),
        })
    };
    ids.into_iter().filter_map(read).collect()
}

/// Value of a `Name:  123 kB` line, wherever the name stands in it, in bytes.
fn kib_field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|w| *w != name);
        words.next()?;
        words.next()?.parse::<u64>().ok()
    });
    value.unwrap_or(0) * 1024
}

#[derive(Clone, Copy)]
enum Version<'a> {
    V1(&'a str),
    V2,
}

/// Directories of this process's group and of all groups above it, as far as they are mounted here.
fn levels(root: &Path, version: Version<'_>) -> Vec<PathBuf> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let Some((mount_point, mount_root)) = mounts.lines().find_map(|line| mount(line, version)) else {
        return Vec::new();
    };
    let group = groups.lines().find_map(|line| group(line, version)).unwrap_or("/");
    // The mount shows the hierarchy from `mount_root` on. With a private cgroup namespace, or when only the
    // container's own group is bind-mounted, the process's path may be outside: then the mount itself is it.
    let below = Path::new(group).strip_prefix(mount_root).unwrap_or(Path::new(""));
    let top = root.join(mount_point.trim_start_matches('/'));
    let mut levels = vec![top.clone()];
    let mut dir = top;
    for name in below.components() {
        match name {
            std::path::Component::Normal(name) => dir.push(name),
            std::path::Component::RootDir | std::path::Component::CurDir => continue,
            _ => break,
        }
        if !dir.is_dir() {
            break;
        }
        levels.push(dir.clone());
    }
    levels
}

/// (mount point, root within the hierarchy) if a `mountinfo` line is the wanted cgroup mount.
fn mount<'a>(line: &'a str, version: Version<'_>) -> Option<(&'a str, &'a str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (mount_root, mount_point) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (fs_type, options) = (right.next()?, right.nth(1).unwrap_or(""));
    let wanted = match version {
        Version::V2 => fs_type == "cgroup2",
        Version::V1(controller) => fs_type == "cgroup" && options.split(',').any(|o| o == controller),
    };
    wanted.then_some((mount_point, mount_root))
}

/// The group's path if a `/proc/self/cgroup` line (`id:controllers:path`) is of the wanted hierarchy.
fn group<'a>(line: &'a str, version: Version<'_>) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let wanted = match version {
        Version::V2 => controllers.is_empty(),
        Version::V1(controller) => controllers.split(',').any(|c| c == controller),
    };
    wanted.then_some(path)
}
