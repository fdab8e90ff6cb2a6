use std::{fmt::Write, net::Ipv4Addr, time::Instant};

use slipgate_abi::Protocol;

use super::*;

fn tcp(addr: [u8; 4], port: u16) -> Destination {
    Destination {
        addr: addr.into(),
        port,
        protocol: Protocol::Tcp,
    }
}

#[test]
fn comments_and_blank_lines_are_counted_but_say_nothing() {
    let text = "# bad places\n\n192.0.2.0/24 # all of it\r\n  198.51.100.7:25/tcp\n\n192.0.2.1\n";
    let file = DenyFile::parse("bad.txt", text).unwrap();
    assert_eq!(file.patterns().count(), 3);
    assert_eq!(
        file.line_for(tcp([192, 0, 2, 1], 80)),
        Some(3),
        "the first line that matches"
    );
    assert_eq!(file.line_for(tcp([198, 51, 100, 7], 25)), Some(4));
    assert_eq!(file.line_for(tcp([198, 51, 100, 7], 26)), None);
    assert_eq!(
        file.pattern_at(4).unwrap().to_string(),
        "198.51.100.7:25/tcp"
    );
    assert_eq!(file.pattern_at(5), None);
}

#[test]
fn an_error_names_file_and_line() {
    let error = DenyFile::parse("bad.txt", "1.2.3.4\n\nexample..com\n").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("bad.txt:3: \"\" in \"example..com\""),
        "{error}"
    );
}

#[test]
fn names_stand_beside_addresses() {
    let text = "192.0.2.1\n*.evil.test\nevil.test # too\nMail.test:25/tcp\nevil.test:80\n";
    let file = DenyFile::parse("bad.txt", text).unwrap();
    assert!(file.has_names());
    let lines = |name: &str| file.lines_about(Name(&crate::wire(name).unwrap()));
    assert_eq!(lines("evil.test"), [3, 5]);
    assert_eq!(lines("a.b.evil.test"), [2]);
    assert!(lines("notevil.test").is_empty());
    assert_eq!(lines("mail.test"), [4]);
    assert_eq!(file.name_at(4).unwrap().to_string(), "mail.test:25/tcp");
    assert_eq!((file.name_at(1), file.pattern_at(2)), (None, None));
    assert_eq!(file.line_for(tcp([192, 0, 2, 1], 80)), Some(1));
}

/// Trying the lines one by one takes thousands of times as long for 100,000 lines as for ten. That
/// the number of *steps* is the same is shown where they are made:
/// `a_hundred_thousand_prefixes_take_as_few_steps_as_ten`,
/// `a_hundred_thousand_names_take_as_many_look_ups_as_ten`. Each step may take longer: data that is
/// in memory for 100,000 lines is in the cache for ten.
const FAR_FROM_ONE_BY_ONE: u64 = 100;

#[test]
fn a_hundred_thousand_names_load_fast_and_are_not_tried_one_by_one() {
    let list = |lines: u32| -> String {
        let line = |i: u32| format!("{}n{i}.bad{}.test\n", ["", "*."][i as usize % 2], i % 99);
        (0..lines).map(line).collect()
    };
    let start = Instant::now();
    let many = DenyFile::parse("many", &list(100_000)).unwrap();
    let load = start.elapsed();
    let most_ms = if cfg!(debug_assertions) { 8_000 } else { 500 };
    assert!(load.as_millis() < most_ms, "took {load:?} to load");
    let few = DenyFile::parse("few", &list(10)).unwrap();
    let names: Vec<_> = (0..1_000)
        .map(|i| crate::wire(&format!("www.n{i}.bad{}.test", i % 99)).unwrap())
        .collect();
    let time = |file: &DenyFile| {
        let start = Instant::now();
        let found: usize = (0..100)
            .flat_map(|_| &names)
            .map(|name| file.lines_about(Name(name)).len())
            .sum();
        (start.elapsed().as_nanos() as u64 / 100_000, found / 100)
    };
    let ((few_ns, few_found), (many_ns, many_found)) = (time(&few), time(&many));
    println!("load {load:?}, match: 10 lines {few_ns} ns, 100,000 lines {many_ns} ns");
    assert_eq!((few_found, many_found), (5, 500));
    assert!(
        many_ns < few_ns * FAR_FROM_ONE_BY_ONE,
        "{many_ns} against {few_ns} ns"
    );
}

/// A list of `lines` distinct addresses and networks, with a few ports.
fn list(lines: u32) -> String {
    let mut text = String::new();
    for i in 0..lines {
        let addr = Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761));
        match i % 4 {
            0 => writeln!(text, "{addr}:443/tcp").unwrap(),
            1 => writeln!(text, "{}/24", Ipv4Addr::from_bits(addr.to_bits() & !0xff)).unwrap(),
            _ => writeln!(text, "{addr}").unwrap(),
        }
    }
    text
}

#[test]
fn a_hundred_thousand_lines_load_in_well_under_a_second_and_are_not_tried_one_by_one() {
    let (few, many) = (list(10), list(100_000));
    let start = Instant::now();
    let many = DenyFile::parse("many", &many).unwrap();
    let load = start.elapsed();
    let few = DenyFile::parse("few", &few).unwrap();
    // Measured: 150 ms optimised, on a busy machine. Tests mostly are not optimised.
    let most_ms = if cfg!(debug_assertions) { 8_000 } else { 500 };
    assert!(load.as_millis() < most_ms, "took {load:?} to load");

    let time = |file: &DenyFile| {
        let start = Instant::now();
        let mut found = 0_u32;
        for i in 0..400_000_u32 {
            let to = Destination {
                addr: Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)).into(),
                port: 443,
                protocol: Protocol::Tcp,
            };
            found += u32::from(file.line_for(to).is_some());
        }
        (start.elapsed().as_nanos() as u64 / 400_000, found)
    };
    let ((few_ns, few_found), (many_ns, many_found)) = (time(&few), time(&many));
    println!("load {load:?}, match: 10 lines {few_ns} ns, 100,000 lines {many_ns} ns");
    assert!(
        many_found > few_found,
        "{many_found} of 100,000, {few_found} of 10"
    );
    assert!(
        many_ns < few_ns * FAR_FROM_ONE_BY_ONE,
        "{many_ns} ns against {few_ns} ns"
    );
}
