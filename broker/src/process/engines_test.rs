use slipgate_abi::SlotIndex;

use super::*;

fn page(next: Option<u64>) -> EngineInventory {
    EngineInventory {
        next,
        ..EngineInventory::default()
    }
}

/// Reads all pages of engines that have so many each, and returns which were asked in order.
fn read(pages: &[u64]) -> Vec<(usize, u64)> {
    let mut asked = Vec::new();
    let mut from = Some(0);
    while let Some(at) = from {
        let (worker, its) = page_of(at, pages.len()).unwrap();
        asked.push((worker, its));
        let answer = page((its + 1 < pages[worker]).then_some(its + 1));
        from = page_of_all(answer, worker, pages.len()).next;
        assert!(
            from.is_none_or(|next| next > at),
            "a reader goes on only forward"
        );
    }
    asked
}

#[test]
fn the_inventory_is_every_engines_in_turn() {
    assert_eq!(read(&[2]), [(0, 0), (0, 1)]);
    assert_eq!(
        read(&[2, 1, 3]),
        [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    );
}

#[test]
fn who_wants_vms_only_is_led_past_an_engines_flows_to_the_next_one() {
    let flows = |page: EngineInventory| EngineInventory {
        flows: vec![(SlotIndex::new(3), 1, "a.test".into())],
        ..page
    };
    let of_first = page_of_all(flows(page(Some(9))), 0, 2);
    let next = of_first.next_with_vms().and_then(|next| page_of(next, 2));
    assert_eq!(next, Some((1, 0)));
    assert_eq!(
        of_first.next.and_then(|next| page_of(next, 2)),
        Some((0, 9))
    );
    assert_eq!(
        page_of_all(flows(page(Some(9))), 1, 2).next_with_vms(),
        None
    );
    let vms = page_of_all(page(Some(9)), 1, 2);
    assert_eq!(vms.next_with_vms(), vms.next);
}

#[test]
fn an_engine_leads_no_reader_to_anothers_pages() {
    let next = page_of_all(page(Some(7 << WORKER_BIT)), 0, 2).next;
    assert_eq!(next.and_then(|next| page_of(next, 2)), Some((1, 0)));
    assert_eq!(page_of_all(page(Some(u64::MAX)), 1, 2).next, None);
    assert_eq!(page_of(u64::MAX, 2), None);
    assert_eq!(page_of(2 << WORKER_BIT, 2), None);
}
