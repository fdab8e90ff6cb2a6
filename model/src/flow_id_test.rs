use super::*;

#[test]
fn ids_are_read_as_they_are_written_and_nothing_else_is_one() {
    let translated = TranslatedId {
        instance: 0x5f,
        slot: SlotIndex::new(17),
        generation: 3,
    };
    let relayed = RelayedId {
        run: 0xabc,
        number: u64::MAX,
    };
    for id in [FlowId::Translated(translated), FlowId::Relayed(relayed)] {
        assert_eq!(FlowId::parse(&id.to_string()), Some(id));
    }
    let of_row = RelayedId {
        run: RelayedId::run_of(u32::MAX, 5),
        ..relayed
    };
    assert_eq!(of_row.owner_row(), 5);
    let json = serde_json::to_string(&relayed).unwrap();
    assert_eq!(json, "\"r00000abc-18446744073709551615\"");
    assert_eq!(serde_json::from_str::<RelayedId>(&json).ok(), Some(relayed));
    for none in [
        "",
        "r",
        "r1-2",
        "rabc",
        "r00000abc",
        "r00000abc-",
        "r00000abc--1",
        "r00000abc-+1",
        "r+0000abc-1",
        "r00000abc-1-2",
        "R00000abc-1",
        "r00000abc-18446744073709551616",
    ] {
        assert_eq!(FlowId::parse(none), None, "{none}");
    }
}
