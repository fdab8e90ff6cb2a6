use super::*;

#[test]
fn a_query_is_as_rfc_1035_has_it() {
    let question = Question {
        id: 0x1234,
        name: "a.example".into(),
        kind: types::A,
    };
    let bytes = question.to_bytes();
    assert_eq!(
        bytes,
        b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01"
    );
    assert_eq!(Question::parse(&bytes), Some(question));
}

#[test]
fn a_reply_survives_and_no_prefix_panics() {
    let question = Question {
        id: 1,
        name: "www.example".into(),
        kind: types::A,
    };
    let records = vec![
        Record::cname("web.example", 60),
        Record::a([203, 0, 113, 10].into(), 5),
        Record::txt(&[b'x'; 300], 5),
    ];
    let reply = Reply {
        question,
        code: 0,
        truncated: true,
        records,
    };
    let bytes = reply.to_bytes();
    assert_eq!(Reply::parse(&bytes), Some(reply));
    for end in 0..bytes.len() {
        assert_eq!(Reply::parse(&bytes[..end]), None, "cut at {end}");
        Question::parse(&bytes[..end]);
    }
}
