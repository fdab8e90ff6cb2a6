use std::{cell::RefCell, net::Ipv4Addr, rc::Rc};

use super::*;

/// A kernel that remembers what it was asked, and has the table 100 for the port 443 alone.
#[derive(Clone, Debug, Default)]
struct Kernel(Rc<RefCell<Vec<Question>>>);

impl AskKernel for Kernel {
    fn ask(&self, question: &Question) -> Option<Answer> {
        self.0.borrow_mut().push(*question);
        (question.transport.to_port == 443).then_some(Answer::Table(100))
    }
}

fn question(last: u8, to_port: u16) -> Question {
    Question {
        mark: 7,
        to: Ipv4Addr::new(192, 0, 2, last).into(),
        from: None,
        transport: Transport {
            protocol: Some(Protocol::Tcp),
            from_port: 40_000,
            to_port,
        },
    }
}

#[test]
fn the_kernel_is_asked_once_until_the_rules_change() {
    let kernel = Kernel::default();
    let mut asked = Asked::new(Box::new(kernel.clone()));
    let count = || kernel.0.borrow().len();
    for _ in 0..2 {
        assert_eq!(asked.answer(question(1, 443)), Some(Answer::Table(100)));
        assert_eq!(count(), 1);
    }
    asked.forget();
    assert_eq!(asked.answer(question(1, 443)), Some(Answer::Table(100)));
    assert_eq!(count(), 2);
    // That it could not be asked is not kept.
    for _ in 0..2 {
        assert_eq!(asked.answer(question(1, 80)), None);
    }
    assert_eq!(count(), 4);
}

#[test]
fn questions_that_share_a_place_are_told_apart() {
    let asked = Asked::new(Box::new(Kernel::default()));
    for last in 0..=255 {
        assert_eq!(asked.answer(question(last, 443)), Some(Answer::Table(100)));
        assert_eq!(asked.answer(question(last, 80)), None);
    }
}

#[test]
fn the_ids_of_icmp_are_no_ports() {
    let flow = FlowTuple {
        scope: 1,
        local: Ipv4Addr::new(10, 0, 2, 15).into(),
        remote: Ipv4Addr::new(192, 0, 2, 1).into(),
        local_port: 77,
        remote_port: 0,
        protocol: 1,
    };
    let of_icmp = Transport {
        protocol: Some(Protocol::Icmp),
        ..Transport::default()
    };
    assert_eq!(Transport::of(&flow), of_icmp);
    let of_udp = Transport::of(&FlowTuple {
        remote_port: 53,
        protocol: 17,
        ..flow
    });
    assert_eq!((of_udp.from_port, of_udp.to_port), (77, 53));
}
