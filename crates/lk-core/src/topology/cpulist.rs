//! Lists of CPU and node numbers in the kernel's notation (`0-3,8`): parsing and printing.

use super::types::{CpuId, NodeId};
use crate::error::{Error, Result};

/// Largest CPU or node number that a list may name; far above what Linux can be built for.
const MAX_ID: u32 = 65_535;

/// Parses a list such as `0-1, 4` into ascending distinct numbers.
///
/// Blanks around numbers, dashes and commas are allowed; an empty text is an empty list, as the kernel
/// writes it for nodes without CPUs. `what` names the setting or file in errors.
///
/// # Errors
/// [`Error::Config`] for anything but numbers and ascending ranges: reversed ranges, negative numbers,
/// empty items, numbers above 65535.
pub fn parse_id_list(what: &str, text: &str) -> Result<Vec<u32>> {
    let bad = |item: &str, why: &str| {
        Error::Config(format!(
            "{what}={:?}: {item:?} {why}; write numbers and ascending ranges separated by commas, such as 0-1,4",
            text.trim()
        ))
    };
    let mut ids = Vec::new();
    if text.trim().is_empty() {
        return Ok(ids);
    }
    for item in text.split(',').map(str::trim) {
        if item.is_empty() {
            return Err(bad(item, "is an empty item"));
        }
        if item.starts_with('-') {
            return Err(bad(item, "is negative"));
        }
        let number = |digits: &str| match digits.trim().parse::<u32>() {
            Ok(n) if n <= MAX_ID && digits.trim().bytes().all(|b| b.is_ascii_digit()) => Ok(n),
            Ok(_) => Err(bad(item, "is out of range")),
            Err(_) => Err(bad(item, "is not a number or a range")),
        };
        let (first, last) = match item.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(item)?, number(item)?),
        };
        if last < first {
            return Err(bad(item, "is a reversed range"));
        }
        ids.extend(first..=last);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Parses a list of logical CPUs; see [`parse_id_list`].
pub fn parse_cpu_list(what: &str, text: &str) -> Result<Vec<CpuId>> {
    Ok(parse_id_list(what, text)?.into_iter().map(CpuId).collect())
}

/// Parses a list of NUMA nodes given by a user (`LVLLM_NUMA_NODES`), which must name at least one.
///
/// # Errors
/// [`Error::Config`] as [`parse_id_list`], and for an empty list.
pub fn parse_node_list(what: &str, text: &str) -> Result<Vec<NodeId>> {
    let ids = parse_id_list(what, text)?;
    if ids.is_empty() {
        return Err(Error::Config(format!(
            "{what} is empty; name at least one node, such as 0-1,4, or unset it"
        )));
    }
    Ok(ids.into_iter().map(NodeId).collect())
}

/// Writes numbers the kernel's way: ascending, runs as ranges (`0-3,8`). Order and repetition of the input
/// don't matter.
pub fn format_id_list(ids: impl IntoIterator<Item = u32>) -> String {
    use std::fmt::Write as _;
    let mut sorted: Vec<u32> = ids.into_iter().collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut text = String::new();
    for run in sorted.chunk_by(|a, b| a + 1 == *b) {
        let (first, last) = (run[0], run[run.len() - 1]);
        if !text.is_empty() {
            text.push(',');
        }
        // Writing to a String cannot fail.
        let _ = if first == last { write!(text, "{first}") } else { write!(text, "{first}-{last}") };
    }
    text
}

/// [`format_id_list`] for CPUs.
pub fn format_cpu_list(cpus: impl IntoIterator<Item = CpuId>) -> String {
    format_id_list(cpus.into_iter().map(|c| c.0))
}

/// [`format_id_list`] for nodes.
pub fn format_node_list(nodes: impl IntoIterator<Item = NodeId>) -> String {
    format_id_list(nodes.into_iter().map(|n| n.0))
}
