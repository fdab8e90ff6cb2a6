use super::*;
use crate::{
    bpf::{Kind, Shape},
    testing::in_netns,
};

const WORD: u32 = size_of::<u32>() as u32;
const ENTRIES: u32 = 1_024;

fn table(kind: Kind) -> Table<u32, u32> {
    let shape = Shape {
        kind,
        key: WORD,
        value: WORD,
        entries: ENTRIES,
    };
    Table::new("a test's", bpf::map_create("test", shape).unwrap(), None)
}

fn keys_left(table: &Table<u32, u32>) -> Vec<u32> {
    let mut keys: Vec<u32> = table.entries().unwrap().iter().map(|e| e.0).collect();
    keys.sort_unstable();
    keys
}

/// The kernel stops at the first absent key.
#[test]
fn absent_keys_among_many_are_passed_over() {
    in_netns("absent_keys_among_many_are_passed_over", || {
        for absent in [
            vec![],
            vec![0],
            vec![9],
            vec![0, 1, 4, 8, 9],
            (0..10).collect(),
        ] {
            let table = table(Kind::HASH);
            for key in (0..12).filter(|key| !absent.contains(key)) {
                table.insert(&key, &7, Insert::New).unwrap();
            }
            let keys: Vec<u32> = (0..10).collect();
            assert_eq!(table.remove_all(&keys).unwrap(), 10 - absent.len());
            assert_eq!(keys_left(&table), [10, 11], "{absent:?}");
        }
        assert_eq!(table(Kind::HASH).remove_all(&[]).unwrap(), 0);
    });
}

/// An AF_XDP map: the kernel deletes its keys, but not in batches, and refuses those out of range.
#[test]
fn where_the_kernel_has_no_batches_keys_are_deleted_one_by_one() {
    const XSKMAP: Kind = Kind {
        number: 17,
        flags: 0,
    };
    in_netns(
        "where_the_kernel_has_no_batches_keys_are_deleted_one_by_one",
        || {
            let table = table(XSKMAP);
            let keys: Vec<u32> = (0..10).collect();
            // SAFETY: as many keys of the map's size.
            let batch = unsafe { bpf::delete_batch(table.as_fd(), keys.as_ptr().cast(), 10) };
            assert!(batch.is_none(), "the kernel deletes its keys in batches");
            assert_eq!(table.remove_all(&keys).unwrap(), 10);
            let refused = table.remove_all(&[0, ENTRIES, 1]).unwrap_err().to_string();
            assert!(refused.contains("delete keys from a test's"), "{refused}");
        },
    );
}

/// Ns for each deleted entry of a map of tuples' size. Two for each flow that ends.
#[test]
#[ignore = "a measurement"]
fn ns_per_deletion() {
    const FLOWS: usize = 256;
    in_netns("ns_per_deletion", || {
        let shape = Shape {
            kind: Kind::HASH,
            key: 20,
            value: 8,
            entries: 262_144,
        };
        let table: Table<[u32; 5], u64> =
            Table::new("a test's", bpf::map_create("test", shape).unwrap(), None);
        let mut rounds = [const { Vec::new() }; 3];
        for round in 0..60_u32 {
            for (way, times) in rounds.iter_mut().enumerate() {
                let keys: Vec<[u32; 5]> = (0..2 * FLOWS as u32)
                    .map(|i| [i.wrapping_mul(2_654_435_761), round, i, 7, way as u32])
                    .collect();
                for key in &keys {
                    table.insert(key, &1, Insert::New).unwrap();
                }
                let begin = std::time::Instant::now();
                let removed = match way {
                    0 => keys.iter().filter(|key| table.remove(key).unwrap()).count(),
                    1 => keys
                        .chunks(2)
                        .map(|pair| table.remove_all(pair).unwrap())
                        .sum(),
                    _ => table.remove_all(&keys).unwrap(),
                };
                assert_eq!(removed, keys.len());
                times.push(begin.elapsed().as_nanos() as usize / keys.len());
            }
        }
        for (way, mut times) in ["one by one", "by pairs", "256 flows"]
            .into_iter()
            .zip(rounds)
        {
            times.sort_unstable();
            let (median, last) = (times[times.len() / 2], times.len() - 1);
            println!(
                "{way}: {median} ns ({} to {})",
                times[last / 10],
                times[last * 9 / 10]
            );
        }
    });
}
