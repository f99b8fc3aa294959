//! Reading machines: synthetic descriptions, fake sysfs and cgroup trees, and this machine.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![expect(unsafe_code, reason = "binds a thread to show that its mask is not used")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use lk_core::topology::{
    Core, CpuId, NodeId, NumaNode, PlanRequest, Topology, WorkerPlan, cpu_quota, format_id_list, gpu_node,
    memory_limits, parse_cpu_list, parse_id_list, parse_node_list, plan_workers,
};

const ONE_NODE: &str = "pack:1 core:4 pu:1";
/// Two sockets of 18 cores, siblings numbered 36 higher.
const TWO_SOCKETS: &str = "pack:2 [numa] core:18 pu:2(indexes=2*36:1*2)";

fn cpus(ids: impl IntoIterator<Item = u32>) -> Vec<CpuId> {
    ids.into_iter().map(CpuId).collect()
}

fn node_ids(topology: &Topology) -> Vec<u32> {
    topology.nodes.iter().map(|n| n.id.0).collect()
}

/// (node, number of workers, CPUs) by node.
fn rows(plan: &WorkerPlan) -> Vec<(u32, usize, String)> {
    let cpus = |n: &lk_core::topology::NodePlan| {
        n.workers.iter().flat_map(|w| w.cpus.clone()).map(|c| c.0).collect::<Vec<_>>()
    };
    plan.nodes.iter().map(|n| (n.node.0, n.workers.len(), format_id_list(cpus(n)))).collect()
}

fn threads(n: usize) -> PlanRequest {
    PlanRequest { threads: Some(n), ..PlanRequest::default() }
}

/// A fresh folder with the given files in it.
fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("topology-{name}"));
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    for (path, text) in files {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn restricted_to_the_cpus_of_one_node() {
    let allowed = cpus((20..30).chain([54]));
    let topology = Topology::from_synthetic_restricted(TWO_SOCKETS, &allowed).unwrap();
    assert_eq!(node_ids(&topology), [1]);
    assert_eq!(
        topology.notes,
        ["NUMA nodes 0 are left out, because none of their CPUs is allowed to this process."]
    );
    // 54 is the sibling of 18, which isn't allowed: it stands for that core.
    let plan = plan_workers(&topology, &PlanRequest::default()).unwrap();
    assert_eq!(rows(&plan), [(1, 11, "20-29,54".into())]);
    let error = Topology::from_synthetic_restricted(TWO_SOCKETS, &cpus([500])).unwrap_err().to_string();
    assert!(error.contains("0-71") && error.contains("500"), "{error}");
}

#[test]
fn bad_synthetic_description_is_an_error() {
    let error = Topology::from_synthetic("pack:zwei").unwrap_err().to_string();
    assert!(error.contains("pack:zwei"), "{error}");
}

#[test]
fn node_numbers_with_a_hole() {
    let topology = Topology::from_synthetic("pack:3 [numa(indexes=0,1,8)] core:2 pu:1").unwrap();
    assert_eq!(node_ids(&topology), [0, 1, 8]);
    let plan =
        plan_workers(&topology, &PlanRequest { nodes: Some(vec![NodeId(8)]), ..PlanRequest::default() });
    assert_eq!(rows(&plan.unwrap()), [(8, 2, "4-5".into())]);
    let unknown = PlanRequest { nodes: Some(vec![NodeId(1), NodeId(2)]), ..PlanRequest::default() };
    let error = plan_workers(&topology, &unknown).unwrap_err().to_string();
    assert_eq!(error, "LVLLM_NUMA_NODES=1-2: node 2 is not a node that this process may use; allowed: 0-1,8");
}

#[test]
fn memory_only_nodes_are_kept_without_workers() {
    let topology =
        Topology::from_synthetic("pack:2 [numa(memory=32GiB)] [numa(memory=64GiB)] core:4 pu:1").unwrap();
    let cores: Vec<usize> = topology.nodes.iter().map(|n| n.cores.len()).collect();
    assert_eq!(cores, [4, 0, 4, 0]);
    assert_eq!(topology.nodes[1].memory_bytes >> 30, 64);
    let plan = plan_workers(&topology, &PlanRequest::default()).unwrap();
    assert_eq!(rows(&plan), [(0, 4, "0-3".into()), (2, 4, "4-7".into())]);
    let error =
        plan_workers(&topology, &PlanRequest { nodes: Some(vec![NodeId(1)]), ..PlanRequest::default() });
    assert!(error.unwrap_err().to_string().contains("node 1 has memory but no CPU"));
    assert!(topology.to_string().contains("node 1: memory only, 64.0 GiB"), "{topology}");
}

#[test]
fn fast_and_slow_cores_with_interleaved_numbers() {
    // P cores with SMT have numbers 0-1, 4-5; E cores 2, 3, 6, 7: hwloc sees six cores of different width.
    let core = |ids: &[u32]| Core { cpus: cpus(ids.iter().copied()), capacity: 1024 };
    let mut topology = Topology {
        nodes: vec![NumaNode {
            id: NodeId(0),
            memory_bytes: 0,
            cores: vec![core(&[0, 1]), core(&[2]), core(&[3]), core(&[4, 5]), core(&[6]), core(&[7])],
        }],
        quota_cpus: None,
        notes: Vec::new(),
    };
    // Favoured P cores clock 2 % higher; that makes no third kind. There is no core_type file.
    let frequencies =
        [5_500_000, 5_500_000, 4_600_000, 4_600_000, 5_600_000, 5_600_000, 4_600_000, 4_600_000];
    let files: Vec<(String, String)> = (frequencies.iter().enumerate())
        .flat_map(|(cpu, khz)| {
            let dir = format!("devices/system/cpu/cpu{cpu}");
            // A kernel that rates all CPUs equal must not hide the difference in clocks.
            [
                (format!("{dir}/cpu_capacity"), "1024\n".into()),
                (format!("{dir}/cpufreq/cpuinfo_max_freq"), format!("{khz}\n")),
            ]
        })
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect();
    topology.set_capacities(&tree("hybrid", &files));
    let order: Vec<(u32, u32)> = topology.nodes[0].cores.iter().map(|c| (c.cpus[0].0, c.capacity)).collect();
    assert_eq!(order, [(0, 1024), (4, 1024), (2, 841), (3, 841), (6, 841), (7, 841)]);
    let plan = |n| rows(&plan_workers(&topology, &threads(n)).unwrap())[0].2.clone();
    assert_eq!(plan(2), "0,4");
    assert_eq!(plan(3), "0,2,4");
    assert_eq!(plan(6), "0,2-4,6-7");
    assert_eq!(plan(7), "0-4,6-7");
    assert!(topology.to_string().contains("(2 of capacity 1024, 4 of capacity 841)"), "{topology}");
    // Two ranks get the same number of each kind.
    for rank in 0..2 {
        let plan =
            plan_workers(&topology, &PlanRequest { rank, world: 2, ..PlanRequest::default() }).unwrap();
        assert_eq!(rows(&plan)[0].2, ["0,2-3", "4,6-7"][rank]);
    }
}

#[test]
fn unrated_cores_stay_equal() {
    let mut topology = Topology::from_synthetic(ONE_NODE).unwrap();
    let before = topology.clone();
    // Only one CPU has a rating: nothing to compare it with.
    topology.set_capacities(&tree("partly", &[("devices/system/cpu/cpu0/cpu_capacity", "512")]));
    assert_eq!(topology, before);
    topology.set_capacities(Path::new("/nonexistent"));
    assert_eq!(topology, before);
}

fn quota_tree(name: &str, cgroup: &str, mountinfo: &str, files: &[(&str, &str)]) -> Option<f64> {
    let mut all = vec![("proc/self/cgroup", cgroup), ("proc/self/mountinfo", mountinfo)];
    all.extend_from_slice(files);
    cpu_quota(&tree(name, &all))
}

#[test]
fn quota_of_version_2_is_the_least_on_the_way_up() {
    let mount = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let files = [
        ("sys/fs/cgroup/a/cpu.max", "400000 100000\n"),
        ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/other/cpu.max", "1000 100000\n"),
    ];
    assert_eq!(quota_tree("v2", "0::/a/b\n", mount, &files), Some(4.0));
    assert_eq!(quota_tree("v2-none", "0::/a/b\n", mount, &files[1..]), None);
    // A container with its own cgroup namespace sees its group as the root of the mount.
    let own = [("sys/fs/cgroup/cpu.max", "250000 100000\n")];
    assert_eq!(quota_tree("v2-ns", "0::/\n", mount, &own), Some(2.5));
    // Only the container's own group is mounted, the path is that of the host.
    assert_eq!(quota_tree("v2-host", "0::/../../docker/x\n", mount, &own), Some(2.5));
}

#[test]
fn quota_of_version_1() {
    let mount = "32 31 0:29 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                 38 31 0:35 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    let groups = "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/\n";
    let files = |quota| {
        [
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", quota),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "50000\n"),
        ]
    };
    assert_eq!(quota_tree("v1", groups, mount, &files("150000\n")), Some(3.0));
    assert_eq!(quota_tree("v1-none", groups, mount, &files("-1\n")), None);
    assert_eq!(cpu_quota(Path::new("/nonexistent")), None);
}

#[test]
fn memory_limits_of_a_container() {
    let root = tree(
        "memory",
        &[
            (
                "proc/meminfo",
                "MemTotal:       100 kB\nMemFree:   10 kB\nMemAvailable:    80 kB\nCached: 30 kB\n",
            ),
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n"),
            ("cg/a/memory.max", "65536\n"),
            ("cg/a/memory.high", "max\n"),
            ("cg/a/memory.current", "40960\n"),
            ("cg/a/memory.stat", "anon 20000\nfile 20960\ninactive_file 8000\nactive_file 960\n"),
            ("sys/devices/system/node/online", "0,8\n"),
            (
                "sys/devices/system/node/node0/meminfo",
                "Node 0 MemTotal: 60 kB\nNode 0 MemFree: 5 kB\nNode 0 Inactive(file): 2 kB\nNode 0 SReclaimable: 1 kB\n",
            ),
            ("sys/devices/system/node/node8/meminfo", "Node 8 MemTotal: 40 kB\nNode 8 MemFree: 4 kB\n"),
        ],
    );
    let limits = memory_limits(&root);
    assert_eq!((limits.total_bytes, limits.available_bytes), (100 << 10, 80 << 10));
    // 65536 less the 32000 that page cache doesn't explain.
    assert_eq!((limits.cgroup_limit_bytes, limits.cgroup_room_bytes), (Some(65536), Some(33536)));
    assert_eq!(limits.usable_bytes(), 33536);
    let nodes: Vec<(u32, u64)> = limits.nodes.iter().map(|n| (n.node.0, n.usable_bytes())).collect();
    assert_eq!(nodes, [(0, 8 << 10), (8, 4 << 10)]);
    let unknown = memory_limits(Path::new("/nonexistent"));
    assert_eq!((unknown.usable_bytes(), unknown.cgroup_limit_bytes), (0, None));
}

#[test]
fn gpu_node_falls_back_with_one_note() {
    let one = Topology::from_synthetic(ONE_NODE).unwrap();
    let two = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    let file = "bus/pci/devices/0000:3b:00.0/numa_node";
    for (name, text) in [("minus", "-1\n"), ("empty", ""), ("offline", "7\n"), ("words", "none\n")] {
        let root = tree(&format!("gpu-{name}"), &[(file, text)]);
        for id in ["0000:3b:00.0", "00000000:3B:00.0", "3B:00.0", "3b:00"] {
            let (node, note) = gpu_node(id, &root, &one);
            assert_eq!(node, Some(NodeId(0)), "{name} {id}");
            let note = note.unwrap();
            assert!(note.contains("0000:3b:00.0") && note.ends_with("node 0 is taken."), "{note}");
        }
        let (node, note) = gpu_node("0000:3b:00.0", &root, &two);
        assert_eq!(node, None);
        assert!(note.unwrap().ends_with("no node among 0-1 is preferred."));
    }
    let (node, note) = gpu_node("0000:3b:00.0", Path::new("/nonexistent"), &one);
    assert_eq!((node, note.is_some()), (Some(NodeId(0)), true));
    let root = tree("gpu-known", &[(file, "1\n")]);
    for id in ["0000:3b:00.0", "00000000:3B:00.0", "3B:00.0", "3b:00"] {
        assert_eq!(gpu_node(id, &root, &two), (Some(NodeId(1)), None));
    }
}

#[test]
fn id_lists() {
    assert_eq!(parse_id_list("x", "0-1, 4").unwrap(), [0, 1, 4]);
    assert_eq!(parse_id_list("x", " 8 ,0 - 2,1\n").unwrap(), [0, 1, 2, 8]);
    assert_eq!(parse_id_list("x", "\n").unwrap(), Vec::<u32>::new());
    assert_eq!(parse_cpu_list("x", "3").unwrap(), [CpuId(3)]);
    for (text, word) in [
        ("3-1", "reversed"),
        ("-1", "negative"),
        ("0,-2", "negative"),
        ("0,,1", "empty item"),
        ("0,", "empty item"),
        ("a", "not a number"),
        ("1-2-3", "not a number"),
        ("+1", "out of range"),
        ("0-99999999", "out of range"),
        ("0-", "not a number"),
    ] {
        let error = parse_node_list("LVLLM_NUMA_NODES", text).unwrap_err().to_string();
        assert!(error.contains("LVLLM_NUMA_NODES") && error.contains(word), "{text}: {error}");
    }
    assert!(parse_node_list("LVLLM_NUMA_NODES", " ").unwrap_err().to_string().contains("empty"));
    assert_eq!(format_id_list([8, 2, 1, 0, 1, 5, 6]), "0-2,5-6,8");
    assert_eq!(format_id_list([]), "");
}

#[test]
fn this_machine() {
    let all = Topology::detect(None).unwrap();
    let cpus_of = |t: &Topology| -> BTreeSet<CpuId> {
        t.nodes.iter().flat_map(|n| &n.cores).flat_map(|c| c.cpus.clone()).collect()
    };
    assert!(!cpus_of(&all).is_empty());
    assert!(all.nodes.iter().any(|n| n.memory_bytes > 0), "{all}");
    let last = *cpus_of(&all).last().unwrap();
    let one = Topology::detect(Some(&[last])).unwrap();
    assert_eq!(cpus_of(&one), BTreeSet::from([last]));
    assert_eq!(plan_workers(&one, &PlanRequest::default()).unwrap().num_workers(), 1);
    assert!(Topology::detect(Some(&[CpuId(60_000)])).unwrap_err().to_string().contains("60000"));
    assert!(memory_limits(Path::new("/")).usable_bytes() > 0);
}

#[test]
fn the_mask_of_the_calling_thread_is_not_used_nor_changed() {
    let all = Topology::detect(None).unwrap();
    let mask = || {
        // SAFETY: cpu_set_t is plain data; the call fills at most its size.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set), 0);
            (0..1024).filter(|&c| libc::CPU_ISSET(c, &set)).collect::<Vec<_>>()
        }
    };
    std::thread::spawn(move || {
        let first = mask()[0];
        // SAFETY: as above; the mask of this thread only.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first, &mut set);
            assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0);
        }
        assert_eq!(mask(), [first]);
        assert_eq!(Topology::detect(None).unwrap(), all);
        assert_eq!(mask(), [first]);
    })
    .join()
    .unwrap();
}
