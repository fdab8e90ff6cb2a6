use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

fn quiet() -> Filter {
    Filter {
        promiscuous: false,
        ..Filter::new(MAC)
    }
}

#[test]
fn a_new_card_is_promiscuous() {
    let filter = Filter::new(MAC);
    assert!(
        [MAC, OTHER, GROUP, BROADCAST]
            .iter()
            .all(|to| filter.wants(to))
    );
}

#[test]
fn its_own_and_broadcast_remain() {
    let filter = quiet();
    assert!(filter.wants(&MAC) && filter.wants(&BROADCAST));
    assert!(!filter.wants(&OTHER) && !filter.wants(&GROUP));
}

#[test]
fn tables_and_modes_add_and_take_away() {
    let tables = Filter {
        unicast: Table::These(vec![OTHER]),
        multicast: Table::These(vec![GROUP]),
        ..quiet()
    };
    assert!(tables.wants(&OTHER) && tables.wants(&GROUP));
    let full = Filter {
        unicast: Table::All,
        multicast: Table::All,
        ..quiet()
    };
    assert!(full.wants(&OTHER) && full.wants(&GROUP));
    let all = Filter {
        all_multicast: true,
        all_unicast: true,
        ..quiet()
    };
    assert!(all.wants(&OTHER) && all.wants(&GROUP));
    let none = Filter {
        no_broadcast: true,
        no_multicast: true,
        no_unicast: true,
        ..all
    };
    assert!(
        ![MAC, OTHER, GROUP, BROADCAST]
            .iter()
            .any(|to| none.wants(to))
    );
}
