use super::*;

#[test]
fn lengths_lie_in_each_other_and_the_name_is_where_rfc_6066_has_it() {
    let hello = ClientHello::to("a.test");
    let record = hello.record();
    let half = |at: usize| usize::from(u16::from_be_bytes([record[at], record[at + 1]]));
    assert_eq!(record[..3], [22, 3, 1]);
    assert_eq!(half(3), record.len() - 5);
    assert_eq!(record[5..7], [1, 0]);
    assert_eq!(half(7), record.len() - 9);
    // Version, random, session id, suites, compression: the extensions.
    let extensions = 9 + 2 + 32 + 33 + 10 + 2;
    assert_eq!(half(extensions), record.len() - extensions - 2);
    let name = b"\0\0\0\x0b\0\x09\0\0\x06a.test";
    assert_eq!(record[extensions + 2..][..name.len()], name[..]);
}

#[test]
fn without_a_name_there_is_no_extension_of_it() {
    let named = ClientHello::to("a.test").handshake().len();
    let nameless = ClientHello::default().extension(0xfe0d, &[1]);
    assert_eq!(nameless.handshake().len(), named - 15 + 5);
}

#[test]
fn a_hello_is_answered_by_a_hello_in_any_pieces_and_all_else_by_itself() {
    let hello = ClientHello::to("a.example").record();
    let answered = answer_to(&hello);
    assert_eq!((answered[5], &answered[6..]), (2, &hello[6..]));
    let (mut pieces, mut answer) = (hello, Answer::default());
    pieces.chunks_mut(3).for_each(|piece| answer.to(piece));
    assert_eq!(pieces, answered);
    assert_eq!(answer_to(b"GET / HTTP/1.1"), b"GET / HTTP/1.1");
}
