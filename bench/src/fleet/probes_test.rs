use super::*;

fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

#[test]
fn an_outage_ends_with_the_arrival_behind_the_longest_gap() {
    let arrivals = [10, 12, 14, 500, 499, 520, 530];
    let probes: Vec<Probe> = (0..)
        .zip(arrivals)
        .map(|(number, arrived)| Probe {
            sent: ms(9 + number),
            arrived: Some(ms(arrived)),
        })
        .collect();
    assert_eq!(end_of_outage(&probes, ms(11)).unwrap(), ms(499));
    // What came before does not count.
    assert_eq!(end_of_outage(&probes, ms(505)).unwrap(), ms(520));
    assert!(end_of_outage(&probes, ms(531)).is_err());
}

#[test]
fn lost_probes_are_counted_and_have_no_time() {
    let probe = |sent, arrived: Option<u64>| Probe {
        sent: ms(sent),
        arrived: arrived.map(ms),
    };
    let probes = [probe(1, Some(2)), probe(3, None), probe(5, Some(9))];
    assert_eq!(lost(&probes), 1);
    assert_eq!(times_us(&probes), [1_000.0, 4_000.0]);
    assert_eq!(between(&probes, ms(2), ms(5)).len(), 1);
}
