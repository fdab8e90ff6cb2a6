use super::*;

const FEW: Range = Range {
    first: 1_000,
    blocks: 3,
};

#[test]
fn blocks_are_apart_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("users");
    let take = |start| {
        let claimed = claim_in(&dir, FEW, start).unwrap();
        claimed.map(|claim| Users {
            claim: Some(Arc::new(claim)),
        })
    };
    // From anywhere on, and round.
    let all: Vec<_> = (0..3).map(|_| take(5).unwrap()).collect();
    let first: Vec<_> = all.iter().map(|users| users.user(0)).collect();
    assert_eq!(first, [1_008, 1_000, 1_004]);
    assert!(take(0).is_none());
    let of = |users: &Users| [0, 1, 2, 3].map(|which| users.user(which));
    assert_eq!(of(&all[0]), [1_008, 1_009, 1_010, 1_011]);
    let copy = all[0].clone();
    drop(all);
    // It is taken for as long as there is a copy.
    assert!(dir.join("1008.lock").exists());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    drop(copy);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    // A killed process's files belong to no process, and are removed.
    for left in ["1000.lock", "1008.lock"] {
        fs::write(dir.join(left), "").unwrap();
    }
    let next = take(0).unwrap();
    assert_eq!(next.user(0), 1_000);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
}

#[test]
fn numbers_that_the_user_namespace_lacks_are_not_taken() {
    let host = "         0          0 4294967295\n";
    let container = "0 100000 65536\n";
    let rootless = "0 1000 1\n1 100000 60000\n";
    let last = |range: &Range| range.first + range.blocks * USERS - 1;
    let has = |map: &str| RANGES.map(|range| is_mapped(map, range.first, last(&range)));
    assert_eq!(has(host), [true, true]);
    assert_eq!(has(container), [false, true]);
    assert_eq!(has(rootless), [false, false]);
    assert_eq!(has(""), [false, false]);
    assert!(is_mapped("10 0 5", 10, 14) && !is_mapped("10 0 5", 10, 15));
    assert!(!is_mapped("10 0 5", 9, 12));
}

#[test]
fn no_block_has_a_number_of_anybody_elses() {
    for range in RANGES {
        let numbers = range.first..range.first + range.blocks * USERS;
        // Nobody, the 16-bit and the 32-bit -1, systemd's dynamic, container and foreign users,
        // those of sssd.
        let theirs = [
            65_534..65_536,
            u32::MAX..u32::MAX,
            61_184..65_520,
            524_288..1_879_048_192,
            2_147_352_576..2_147_418_112,
            200_000..2_000_200_000,
        ];
        for other in theirs {
            assert!(
                numbers.end <= other.start || other.end <= numbers.start,
                "{range:?} {other:?}"
            );
        }
    }
}
