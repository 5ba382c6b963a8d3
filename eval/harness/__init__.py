"""What every measurement needs: windows of text, caches by name, timing, and checks that results are right."""
