use std::{fmt::Write, net::Ipv4Addr};

use slipgate_abi::Protocol;

use super::*;
use crate::cpu_time_test::cpu_time;

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
const FAR_FROM_ONE_BY_ONE: u32 = 100;

/// Loading ten times as many lines takes ten times as long, and a hundred times where each line is
/// compared with those before it.
const FAR_FROM_SQUARED: u32 = 40;

#[test]
fn a_hundred_thousand_names_are_neither_loaded_nor_tried_one_by_one() {
    let list = |lines: u32| -> String {
        let line = |i: u32| format!("{}n{i}.bad{}.test\n", ["", "*."][i as usize % 2], i % 99);
        (0..lines).map(line).collect()
    };
    let (few, many) = few_and_many(list);
    let names: Vec<_> = (0..1_000)
        .map(|i| crate::wire(&format!("www.n{i}.bad{}.test", i % 99)).unwrap())
        .collect();
    let time = |file: &DenyFile| {
        let about = |n: usize| file.lines_about(Name(&names[n % names.len()])).len();
        cpu_time(|| (0..100_000).map(about).sum::<usize>())
    };
    let ((few_took, few_found), (many_took, many_found)) = (time(&few), time(&many));
    println!("100,000 look-ups: {few_took:?} in 10 lines, {many_took:?} in 100,000");
    assert_eq!((few_found, many_found), (500, 50_000));
    assert!(many_took < few_took * FAR_FROM_ONE_BY_ONE);
}

/// Loads lists of 10 and of 100,000 lines. Panics if the time to load grows faster than the list.
fn few_and_many(list: impl Fn(u32) -> String) -> (DenyFile, DenyFile) {
    let load = |text: String| cpu_time(|| DenyFile::parse("a list", &text).unwrap());
    let (tenth_took, _) = load(list(10_000));
    let (many_took, many) = load(list(100_000));
    println!("loaded: 10,000 lines in {tenth_took:?}, 100,000 in {many_took:?}");
    assert!(many_took < tenth_took * FAR_FROM_SQUARED);
    (load(list(10)).1, many)
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
fn a_hundred_thousand_lines_are_neither_loaded_nor_tried_one_by_one() {
    let (few, many) = few_and_many(list);
    let time = |file: &DenyFile| {
        let to = |i: u32| Destination {
            addr: Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)).into(),
            port: 443,
            protocol: Protocol::Tcp,
        };
        cpu_time(|| {
            (0..400_000)
                .filter(|&i| file.line_for(to(i)).is_some())
                .count()
        })
    };
    let ((few_took, few_found), (many_took, many_found)) = (time(&few), time(&many));
    println!("400,000 look-ups: {few_took:?} in 10 lines, {many_took:?} in 100,000");
    assert!(many_found > few_found, "{many_found} and {few_found}");
    assert!(many_took < few_took * FAR_FROM_ONE_BY_ONE);
}
