//! From `topk_ids` to one list of rows per expert, without allocation once the capacity is reached.

use crate::{Error, Result};

/// One expert that at least one row of the step uses, and its range in the pair arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActiveExpert {
    /// Local expert index.
    pub expert: u32,
    /// First pair in [`Routing::tokens`] and [`Routing::weights`].
    pub start: u32,
    /// Number of pairs; at least 1.
    pub len: u32,
}

impl ActiveExpert {
    /// The pairs of this expert.
    pub fn pairs(&self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

/// The (token, expert) pairs of one step, grouped by expert in ascending order and by token within an expert.
#[derive(Debug, Default)]
pub struct Routing {
    /// Experts in use, ascending.
    pub active: Vec<ActiveExpert>,
    /// Token (row of `hidden_states`) of each pair.
    pub tokens: Vec<u32>,
    /// Router weight of each pair.
    pub weights: Vec<f32>,
    counts: Vec<u32>,
    cursor: Vec<u32>,
}

impl Routing {
    /// Groups `topk_ids` `[num_tokens, top_k]` by expert.
    ///
    /// An id of -1 marks padding and is skipped. With `expert_map` (global id to local id, -1 = held
    /// elsewhere) ids are global, otherwise they are local. Duplicate ids of one token both count.
    ///
    /// # Errors
    /// [`Error::Argument`] names the token and the id when an id is out of range.
    pub fn build(
        &mut self,
        topk_ids: &[i32],
        topk_weights: &[f32],
        top_k: usize,
        num_experts: usize,
        expert_map: Option<&[i32]>,
    ) -> Result<()> {
        self.counts.clear();
        self.counts.resize(num_experts, 0);
        for (i, &id) in topk_ids.iter().enumerate() {
            if let Some(e) =
                local_expert(id, num_experts, expert_map).map_err(|m| out_of_range(i, top_k, &m))?
            {
                self.counts[e] += 1;
            }
        }
        self.active.clear();
        self.cursor.clear();
        self.cursor.resize(num_experts, 0);
        let mut start = 0;
        for (e, &len) in self.counts.iter().enumerate() {
            if len > 0 {
                self.active.push(ActiveExpert { expert: e as u32, start, len });
                self.cursor[e] = start;
                start += len;
            }
        }
        self.tokens.clear();
        self.tokens.resize(start as usize, 0);
        self.weights.clear();
        self.weights.resize(start as usize, 0.0);
        for (i, (&id, &weight)) in topk_ids.iter().zip(topk_weights).enumerate() {
            if let Ok(Some(e)) = local_expert(id, num_experts, expert_map) {
                let at = self.cursor[e] as usize;
                self.cursor[e] += 1;
                self.tokens[at] = (i / top_k) as u32;
                self.weights[at] = weight;
            }
        }
        Ok(())
    }

    /// Number of (token, expert) pairs of the step.
    pub fn num_pairs(&self) -> usize {
        self.tokens.len()
    }
}

fn local_expert(
    id: i32,
    num_experts: usize,
    expert_map: Option<&[i32]>,
) -> std::result::Result<Option<usize>, String> {
    if id == -1 {
        return Ok(None);
    }
    let local = match expert_map {
        None => id,
        Some(map) => match usize::try_from(id).ok().and_then(|g| map.get(g)) {
            Some(&local) => local,
            None => return Err(format!("{id} is not in 0..{} (or -1 for padding)", map.len())),
        },
    };
    match usize::try_from(local) {
        Ok(e) if e < num_experts => Ok(Some(e)),
        _ if expert_map.is_some() && local == -1 => Ok(None),
        _ => Err(format!("{local} is not in 0..{num_experts} (or -1 for padding)")),
    }
}

fn out_of_range(index: usize, top_k: usize, what: &str) -> Error {
    Error::Argument(format!("topk_ids[{}, {}]: expert {what}", index / top_k, index % top_k))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(ids: &[i32], k: usize, e: usize, map: Option<&[i32]>) -> Result<Routing> {
        let mut r = Routing::default();
        let weights: Vec<f32> = (0..ids.len()).map(|i| i as f32).collect();
        r.build(ids, &weights, k, e, map)?;
        Ok(r)
    }

    #[test]
    fn groups_by_expert_and_keeps_token_order() {
        let r = build(&[3, 1, 1, 0, 3, -1], 2, 4, None).unwrap();
        assert_eq!(
            r.active,
            [
                ActiveExpert { expert: 0, start: 0, len: 1 },
                ActiveExpert { expert: 1, start: 1, len: 2 },
                ActiveExpert { expert: 3, start: 3, len: 2 }
            ]
        );
        assert_eq!(r.tokens, [1, 0, 1, 0, 2]);
        assert_eq!(r.weights, [3.0, 1.0, 2.0, 0.0, 4.0]);
    }

    #[test]
    fn duplicates_of_one_token_both_count() {
        let r = build(&[2, 2], 2, 3, None).unwrap();
        assert_eq!(r.tokens, [0, 0]);
        assert_eq!(r.weights, [0.0, 1.0]);
    }

    #[test]
    fn padding_only_is_empty() {
        let r = build(&[-1, -1], 2, 3, None).unwrap();
        assert!(r.active.is_empty());
        assert_eq!(r.num_pairs(), 0);
    }

    #[test]
    fn expert_map_drops_what_is_held_elsewhere() {
        let r = build(&[0, 1, 2, 3], 2, 2, Some(&[-1, 0, -1, 1])).unwrap();
        assert_eq!(r.tokens, [0, 1]);
        assert_eq!(r.weights, [1.0, 3.0]);
    }

    #[test]
    fn out_of_range_names_the_place() {
        for (ids, map) in [(&[0, 4][..], None), (&[0, -2], None), (&[0, 9], Some(&[0, 1, 2][..]))] {
            let e = build(ids, 2, 4, map).unwrap_err().to_string();
            assert!(e.contains("topk_ids[0, 1]"), "{e}");
        }
    }
}
