"""What every compressor and decompressor has read before it begins: a page of this and that.

So a short file is not compressed by a model that knows nothing. Every compressed file depends on
every byte of this: a change needs a new version of the format (`container.VERSION`).
"""

PRIMER = rb'''
date,name,value,price
2019-01-31,north,120,3.50
2020-12-01,south,98,12.75
{"name": "value", "id": 10, "items": [true, false, null], "type": "text", "url":
"https://www.example.com/index.html"}
<html><head><title>Page</title></head><body><div class="content"><p>A <a
href="https://example.org/">link</a> and a list:</p><ul><li>one</li></ul></div></body></html>
#include <stdio.h>
#define SIZE 256
static int find(const char *text, unsigned int length) {
    int i, count = 0;
    for (i = 0; i < length; i++) {
        if (text[i] == '\n') {
            count++;
        } else if (text[i] == 0) {
            return -1;
        }
    }
    return count;
}
import os
import sys
from dataclasses import dataclass


class Record(object):
    """The name and the value of a record."""

    def __init__(self, name: str, value: int = 0) -> None:
        self.name = name
        self.value = value

    def read(self, path):
        with open(path, "rb") as file:
            data = [line.strip() for line in file if not line.startswith("#")]
        if self.value is None or len(data) == 0:
            raise ValueError(f"the file {path} is empty")
        return {key: value for key, value in data}


def main() -> None:
    for index in range(10):
        print(index, end=" ")


if __name__ == "__main__":
    main()

# The first part

The following table shows the number of people in the different parts of the
system, and what they used. For example, the [first version](index.html) of
the program was written in the same language; see the **second section**
below, or use the `--help` option. If you want to change the configuration
file, you should not use the default settings, because they will be removed
in the next release.

* one of the most important things to know about the information on this page
* another example, which can be found under http://www.example.com/

1. Take the bread out of the oven, and let it stand for about ten minutes before it is cut.
2. It is possible that this would have been better with a little more water.

CHAPTER I

My dear friend, I have received your letter of the third, for which I thank
you very much. Nothing could have given me greater pleasure than to hear
that you are well again, and that your sister has been with you. As for
myself, I am just as I was when you last saw me: I read, I write, I go out
every day if the weather will let me, and I think of all that has happened
to us since the summer. They tell me that the road over the mountains is
open now; so perhaps you may come to us before the end of the month? Do not
wait too long. Believe me, ever yours, J. W.

CHAPTER II. THE JOURNEY

"I don't know what you mean," said the old man, looking at her with a
strange smile upon his face. "It's getting late, and there is nothing more
that we can do about it, Mr. Brown. Where have you been all this time?"

"Yes," she answered slowly. "You were right, of course. I think I have never
seen anything like that before." She turned away from the window and went
across the room towards the door, through which there came a little light.
For a moment I could see nothing but the darkness around me; then, quite
suddenly, something moved, and I heard the sound of a voice that was very
near to us.

It was already night when they reached the great house at the end of the
street. At first he thought that everything had been left just as it was,
but after some minutes he began to understand that someone must have been
there only a few hours before them. His hands were cold; his heart beat
fast. The other men stood together without a word, and looked into each
other's eyes. "We'll wait here until morning," one of them said at last,
"and then we shall see whether they are still alive. Perhaps it would be
better to leave now. Why should they have come back?"

There was, however, no other way. The world is not always what it seems to
be: we take things as they are, or as we believe them to be, and we make of
them whatever we can. Three or four years had passed since the war, and most
of those who had returned were no longer young. They had their own work,
their friends, their children; sometimes they would talk about the past,
though never for long. Every evening, between five and six o'clock, the
captain walked down to the water with his dog, sat upon a stone and watched
the ships going out to sea. He was a tall, quiet man of about fifty, with
grey hair and a kind face, and he had seen more of life than anyone else in
the village. It seemed to me that he might have told us a great deal, if
only we had asked him. But that is another story, and these things happened
a long time ago.
'''
