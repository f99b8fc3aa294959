//! Transposing 32-bit words while packing.

/// Steps that are transposed together: one cache line of each row.
pub const BLOCK_WORDS: usize = 16;

/// Writes words `0 .. 16` of 32 rows as 16 steps of 32 words; `rows` are 64 bytes each, `block` 2048.
///
/// # Panics
///
/// If a slice has another length.
pub fn transpose_words(rows: &[&[u8]; 32], block: &mut [u8]) {
    assert!(rows.iter().all(|r| r.len() == BLOCK_WORDS * 4) && block.len() == BLOCK_WORDS * 32 * 4);
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was just found, the lengths were just checked.
        unsafe { avx2(rows, block.as_mut_ptr()) };
        return;
    }
    for (c, row) in rows.iter().enumerate() {
        for (s, word) in row.chunks_exact(4).enumerate() {
            block[(s * 32 + c) * 4..][..4].copy_from_slice(word);
        }
    }
}

/// Eight transpositions of 8 × 8 words: four groups of rows, two of words.
///
/// # Safety
///
/// AVX2; rows of 64 bytes, 2048 bytes at `block`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(rows: &[&[u8]; 32], block: *mut u8) {
    use std::arch::x86_64::*;
    for first in (0..32).step_by(8) {
        for words in [0, 8] {
            // SAFETY: eight words of eight rows from `words` on; steps words .. words + 8 at channels first .. first + 8.
            unsafe {
                let mut r = [_mm256_setzero_si256(); 8];
                for (i, r) in r.iter_mut().enumerate() {
                    *r = _mm256_loadu_si256(rows[first + i].as_ptr().add(words * 4).cast());
                }
                let mut t = [_mm256_setzero_si256(); 8];
                for i in 0..4 {
                    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
                }
                // u[4h + w]: word w (and w + 4) of rows 4h .. 4h + 4.
                let mut u = [_mm256_setzero_si256(); 8];
                for h in 0..2 {
                    u[4 * h] = _mm256_unpacklo_epi64(t[4 * h], t[4 * h + 2]);
                    u[4 * h + 1] = _mm256_unpackhi_epi64(t[4 * h], t[4 * h + 2]);
                    u[4 * h + 2] = _mm256_unpacklo_epi64(t[4 * h + 1], t[4 * h + 3]);
                    u[4 * h + 3] = _mm256_unpackhi_epi64(t[4 * h + 1], t[4 * h + 3]);
                }
                for w in 0..4 {
                    let low = _mm256_permute2x128_si256::<0x20>(u[w], u[4 + w]);
                    let high = _mm256_permute2x128_si256::<0x31>(u[w], u[4 + w]);
                    let to = block.add(((words + w) * 32 + first) * 4);
                    _mm256_storeu_si256(to.cast(), low);
                    _mm256_storeu_si256(to.add(4 * 32 * 4).cast(), high);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_goes_to_its_step_and_channel() {
        let data: Vec<u8> = (0..32 * 64).map(|i| (i * 7 + i / 256) as u8).collect();
        let rows: [&[u8]; 32] = std::array::from_fn(|c| &data[c * 64..][..64]);
        let mut block = vec![0u8; 2048];
        transpose_words(&rows, &mut block);
        for c in 0..32 {
            for s in 0..16 {
                assert_eq!(block[(s * 32 + c) * 4..][..4], rows[c][s * 4..][..4], "channel {c}, step {s}");
            }
        }
    }
}
