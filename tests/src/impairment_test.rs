use super::*;

fn fates(seed: u64) -> (Vec<u8>, ImpairmentCounts) {
    let mut link = ImpairedLink::new(Impairment::rough(seed), 0);
    let start = Instant::now();
    let mut out = Vec::new();
    for number in 0..20_000u32 {
        let now = start + Duration::from_micros(number.into()) * 10;
        link.push(now, &number.to_be_bytes());
        while let Some(frame) = link.pop(now) {
            out.extend(frame);
        }
    }
    while let Some(frame) = link.pop(start + Duration::from_secs(10)) {
        out.extend(frame);
    }
    (out, link.counts)
}

#[test]
fn the_seed_decides() {
    assert_eq!(fates(1), fates(1));
    assert_ne!(fates(1).0, fates(2).0);
}

#[test]
fn the_rates_are_those_asked_for() {
    let (out, counts) = fates(3);
    assert!((150..250).contains(&counts.lost), "{counts:?}");
    assert!((60..140).contains(&counts.duplicated), "{counts:?}");
    assert!((150..250).contains(&counts.reordered), "{counts:?}");
    assert_eq!(
        out.len() as u64 / 4,
        20_000 - counts.lost + counts.duplicated
    );
    let order: Vec<u32> = out
        .chunks(4)
        .map(|c| u32::from_be_bytes([c[0], c[1], c[2], c[3]]))
        .collect();
    assert!(!order.is_sorted());
}
